"""What a run must keep over its restarts: the model, the data it has consumed, and settings of its files.

```
 run folder: identity.json   settings, a digest of the model, the names of the data
             sequence.u64    a digest of each task, in the order of dispatch
```

A restart continues at a position of the data, with the groups, checkpoints and log-probs of the runs before.
With another model or other data these would silently be those of another run.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from async_rl.config import Config
from async_rl.data.dataset import load_run_tasks
from async_rl.errors import AsyncRLError, ConfigError
from async_rl.observability.sft_record import holds_sft_records
from async_rl.runtime.files import replace_file
from async_rl.store.ledger import Ledger

_FILE: Final = "identity.json"
_SEQUENCE: Final = "sequence.u64"
_MODEL_FILES: Final = (
    *("config.json", "generation_config.json", "chat_template.jinja", "chat_template.json"),
    *("tokenizer*.json", "vocab.json", "vocab.txt", "merges.txt", "*.model", "*.tiktoken"),
    *("added_tokens.json", "special_tokens_map.json"),
)
"""Patterns of files other than weights, with those that tokenizers have without a tokenizer.json."""
_SAMPLE_BYTES: Final = 1 << 16
"""Of each file of weights, from its start, its middle and its end: two models of one shape differ there."""

_OF_TASKS: Final = ("tasks", "the data, data.shuffle and run.seed")
_OF_BATCHES: Final = ("batches", "sft.path, sft.batch_tokens, sft.shuffle and run.seed")
"""What a sequence is of, and what determines it."""

Digests = npt.NDArray[np.uint64]


class _Identity(msgspec.Struct, frozen=True, kw_only=True):
    settings: dict[str, Any]
    model: str
    """The digest of the model's config, tokenizer and weights."""
    model_path: str
    data: str
    """Names the data, for messages."""
    all_tasks: str
    """The digest of all tasks in the order of their files; empty for batches."""
    length: int
    """Of the sequence."""


def check_identity(config: Config, run_dir: Path, *, record: bool = True) -> None:
    """Refuse to continue a run of `async-rl train` with another model or other data; record both.

    Args:
        config: The run's config.
        run_dir: The run's folder.
        record: Whether both are recorded; without, nothing is written.

    Raises:
        ConfigError: Something changed that must not, or the folder is that of a supervised run.
        AsyncRLError: The run was begun by another version of this program.
    """
    if holds_sft_records(metrics := run_dir / "metrics.jsonl"):
        raise ConfigError(f"{metrics} belongs to a supervised run: set another run.name")
    consumed = _num_consumed(run_dir)
    if not (record or consumed):
        return
    tasks = load_run_tasks(config)
    order = tasks.order(config.run.seed, config.data.shuffle)
    of_tasks = np.array([_digest(msgspec.msgpack.encode(task, enc_hook=str)) for task in tasks], np.uint64)
    sequence = of_tasks[[order.task_at(position) for position in range(len(tasks))]]
    all_tasks = hashlib.blake2b(of_tasks.tobytes(), digest_size=16).hexdigest()
    sources = " + ".join(f"{each.path} ({len(each.tasks)} tasks)" for each in tasks.datasets)
    settings = {"rollout.group_size": config.rollout.group_size}
    _check(config, run_dir, settings, sources, sequence, all_tasks, consumed, _OF_TASKS, record=record)


def _num_consumed(run_dir: Path) -> int:
    """Return how many tasks a run has dispatched; opens a copy of its ledger, because opening it writes."""
    with tempfile.TemporaryDirectory() as scratch:
        for name in ("ledger.sqlite", "ledger.sqlite-wal"):
            if (run_dir / name).exists():
                shutil.copy(run_dir / name, scratch)
        if not (file := Path(scratch) / "ledger.sqlite").exists():
            return 0
        try:
            ledger = Ledger(file)
        except AsyncRLError as error:
            raise AsyncRLError(str(error).replace(scratch, str(run_dir))) from error
        consumed = ledger.data_position().cursor
        ledger.close()
        return consumed


def check_sft_identity(
    config: Config, run_dir: Path, batches: Sequence[bytes], consumed: int, *, record: bool = True
) -> None:
    """Refuse to continue a supervised run with another model or other data; record both.

    Args:
        config: The run's config.
        run_dir: The run's folder.
        batches: The content of each batch, in order.
        consumed: How many batches the run has trained on.
        record: Whether both are recorded; without, nothing is written.

    Raises:
        ConfigError: Something changed that must not.
    """
    sequence = np.array([_digest(batch) for batch in batches], np.uint64)
    _check(config, run_dir, {}, config.sft.path or "", sequence, "", consumed, _OF_BATCHES, record=record)


def _check(
    config: Config,
    run_dir: Path,
    settings: dict[str, Any],
    data: str,
    sequence: Digests,
    all_tasks: str,
    consumed: int,
    kind: tuple[str, str],
    *,
    record: bool,
) -> None:
    trainer = config.trainer
    settings |= {
        "model.dtype": config.model.dtype,
        "trainer.lora": msgspec.to_builtins(trainer.lora),
        "trainer.loss.advantages": "gae" if trainer.loss.advantages == "gae" else "without a critic",
    }
    now = _Identity(
        settings=settings,
        model=_model_digest(Path(config.model.path)),
        model_path=config.model.path,
        data=data,
        all_tasks=all_tasks,
        length=len(sequence),
    )
    file = run_dir / _FILE
    if consumed and file.exists():
        try:
            before = msgspec.json.decode(file.read_bytes(), type=_Identity)
            old = np.fromfile(run_dir / _SEQUENCE, np.uint64)
            if len(old) != before.length:
                raise OSError(f"{_SEQUENCE} has {len(old)} entries, expected {before.length}")
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(
                f"{run_dir} has lost what model and data it was begun with: {error}; restore {_FILE} and "
                f"{_SEQUENCE} from a backup, or delete both to continue with those of the config"
            ) from error
        _compare(run_dir, before, now)
        changed = _first_change(old, sequence, consumed)
        # The sequence of a weighted mixture need not have all tasks in it.
        if changed is None and consumed > len(old) and before.all_tasks != all_tasks:
            changed = len(old)
        if changed is not None:
            raise ConfigError(
                f"{run_dir} has consumed {consumed} {kind[0]} of {before.data}, and number {changed + 1} is "
                f"another one in {data}: set back {kind[1]}, or choose another run.name. A file may grow "
                "behind what was consumed, in the first epoch of a run that does not shuffle"
            )
    if record:
        # Durable, as a checkpoint is, which a start continues only with the data of the run.
        replace_file(run_dir / _SEQUENCE, sequence.tobytes(), durable=True)
        replace_file(file, msgspec.json.encode(now), durable=True)


def _compare(run_dir: Path, before: _Identity, now: _Identity) -> None:
    """Compare what must be equal.

    Raises:
        ConfigError: With the old and the new value.
    """
    changes = [
        f"{name} = {_text(old)}, which is {_text(now.settings[name])} now"
        for name, old in before.settings.items()
        if name in now.settings and now.settings[name] != old
    ]
    if before.model != now.model:
        changes.append(
            f"the model in {before.model_path}, which is another one than that in {now.model_path} now"
        )
    if changes:
        raise ConfigError(
            f"{run_dir} was begun with {'; '.join(changes)}: set it back, or choose another run.name"
        )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _first_change(old: Digests, new: Digests, consumed: int) -> int | None:
    """Return the first consumed position with another task; None if there is none.

    Orders of later epochs are equal if the data are.
    """
    if np.array_equal(old, new):
        return None
    length = min(len(old), len(new))
    different = np.flatnonzero(old[: min(length, consumed)] != new[: min(length, consumed)])
    if len(different):
        return int(different[0])
    return length if consumed > length else None


def _model_digest(folder: Path) -> str:
    """Return a digest of a model: config and tokenizer whole, of weights sizes and samples."""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted({file for pattern in _MODEL_FILES for file in folder.glob(pattern)}):
        digest.update(f"{file.name} {_digest(file.read_bytes())}".encode())
    for file in sorted((*folder.glob("*.safetensors"), *folder.glob("*.bin"))):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as weights:
            for begin in (0, size // 2, max(0, size - _SAMPLE_BYTES)):
                weights.seek(begin)
                digest.update(weights.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _digest(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
