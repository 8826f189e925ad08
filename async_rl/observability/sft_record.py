"""The record of one step of supervised training: a line of its `metrics.jsonl`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from async_rl.errors import ConfigError
from async_rl.observability.record_log import RecordLog
from async_rl.observability.records import Figure


class SftRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One step. Its field names are those of `StepRecord`, so that programs can read both kinds of
    `metrics.jsonl`.
    """

    step: int
    weight_version: int
    """Equal to the step, because each step produces one weight version."""
    num_steps: int = 0
    """Steps of the whole run; 0 in records of earlier versions."""
    time_s: float
    """Seconds since the first step of the run, earlier incarnations included."""
    epoch: int
    """From 0."""
    loss: Figure
    """Mean negative log-prob of the trained tokens before the step, nats."""
    validation_loss: Figure = None
    """Mean negative log-prob over the validation file after the step; None in steps without validation."""
    grad_norm: Figure = None
    learning_rate: float
    updates_skipped: int = 0
    tokens: int
    trained_tokens: int
    step_s: float
    tokens_per_s: float

    @property
    def epoch_number(self) -> int:
        """The epoch, from 1."""
        return self.epoch + 1


def holds_sft_records(path: Path) -> bool | None:
    """Return whether a `metrics.jsonl` is of a supervised run, by its first step; None if it has none.

    Raises:
        ConfigError: Its first line is no record.
    """
    if not path.exists():
        return None
    with path.open("rb") as lines:
        first = lines.readline()
    try:
        return "epoch" in msgspec.json.decode(first, type=dict[str, Any]) if first.endswith(b"\n") else None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is damaged in its first line ({error}): restore it, or remove it"
        ) from error


def sft_record_log(path: Path) -> RecordLog[SftRecord]:
    """Open the `metrics.jsonl` of a supervised run."""
    return RecordLog(path, SftRecord, lambda record: record.step)
