"""`async-rl replay-step CAPTURE`: trains a captured step once more and compares it with the run.

```
capture ─► its batches ─┬─ --until rollout: verify and show what the trainer was given
                        └─► ranks, from the checkpoint ─► each step up to the captured one ─► compare
```

On the layout of the run, loss, gradient norm and log-probs must be those of the run, bit for bit; on another
layout, or with other settings, within 1e-5.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
from msgspec.structs import replace
from rich import box
from rich.table import Table

from async_rl.config import Config, WeightsConfig, load_config
from async_rl.config.reference import versions
from async_rl.errors import AsyncRLError, CorruptFrame, DataError
from async_rl.observability.formatting import number_ranges
from async_rl.run.captures import Capture, load_capture
from async_rl.run.folder import result_folder, run_console, run_in_folder
from async_rl.run.preflight import check_trainer
from async_rl.runtime.printable import print_text
from async_rl.store import frames, kept_batches
from async_rl.store.kept_batches import kept_steps, load_batch, load_result, step_folder
from async_rl.trainer_protocol import StepResult, Trainer
from async_rl.types import TakenBatch, root_of

OpenTrainer = Callable[[Config, Path], AbstractAsyncContextManager[Trainer]]

TOLERANCE: Final = 1e-5
"""Largest difference on another layout, relative for values above 1."""

_COMPARED: Final = ("loss", "grad_norm", "log_prob_diff", "log_prob_abs_diff")
"""Log-probs too: a group of equal rewards has no part in the loss."""
_SHOWN: Final = (*_COMPARED, "ppo_kl", "ppo_kl_bypass")


class ReplayDiffers(AsyncRLError):
    """A replayed step has another loss, gradient norm or other log-probs than the captured one."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """A figure of a step, as captured and as replayed."""

    step: int
    figure: str
    captured: float | None
    """None: the step did not finish in the run."""
    replayed: float

    @property
    def difference(self) -> float:
        """The absolute difference, relative for values above 1; 0: equal bit for bit."""
        if self.captured is None or self.captured == self.replayed:
            return 0.0
        if math.isnan(self.captured) or math.isnan(self.replayed):
            return 0.0 if math.isnan(self.captured) and math.isnan(self.replayed) else math.inf
        return abs(self.captured - self.replayed) / max(1.0, abs(self.captured))

    def __str__(self) -> str:
        """One figure of the line of a step."""
        if self.captured is None:
            verdict = "not in the run"
        else:
            verdict = "equal" if not self.difference else f"{self.difference:.1e} from the run"
        return f"{self.figure} {self.replayed:.8g} ({verdict})"


@asynccontextmanager
async def start_trainer(config: Config, folder: Path) -> AsyncIterator[Trainer]:
    """Start the ranks as a run does, so that they compute with as many threads."""
    from async_rl.placement import ray_cluster  # imports Ray, which takes a second

    async with ray_cluster(config, folder) as cluster:
        yield await cluster.start_trainer()


def replay_step(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    until: Literal["rollout", "step"] = "step",
    out: Path | None = None,
    as_json: bool = False,
    open_trainer: OpenTrainer = start_trainer,
) -> int:
    """Repeat a captured step.

    Args:
        path: The folder of the capture.
        overrides: `dotted.key=value` changes to the run's config, such as another layout.
        until: rollout: only verify and show the batch, which needs neither trainer nor model.
        out: Where logs go; None: into the capture.
        as_json: Print JSON lines.
        open_trainer: Starts the ranks.

    Returns:
        The exit code.

    Raises:
        ConfigError: The folder is no capture, or its config cannot work.
        DataError: Batches are missing or damaged.
        ReplayDiffers: The step is not reproduced.
    """
    capture = load_capture(path)
    if until == "rollout":
        return _show_batch(load_batch(batch_folder(path, capture.step)), capture, as_json)
    captured = load_config(path / "config.yaml")
    config = config_of_replay(load_config(path / "config.yaml", overrides))
    check_trainer(config, config.trainer.worker, "trainer.worker")
    batches = load_batches(path, capture)
    checkpoint = checkpoint_of(path, capture)
    same = config.trainer == captured.trainer and config.model == captured.model
    console = run_console()
    found: list[Comparison] = []

    def say(line: str) -> None:
        if not as_json:
            console.print(line, highlight=False, markup=False, soft_wrap=True)

    async def run(folder: Path, stop: asyncio.Event) -> list[Comparison]:
        start = f"the checkpoint of step {capture.base_step}" if checkpoint else config.model.path
        say(f"step {capture.step} of {capture.run}, captured because {capture.reason}")
        say(f"starting {config.trainer.num_ranks} trainer ranks from {start}; logs in {folder / 'logs'}")
        async with open_trainer(config, folder) as trainer:
            await trainer.setup(checkpoint)
            for step, batch in batches.items():
                compared = await repeat_step(trainer, path, batch, step)
                found.extend(compared)
                say(f"step {step}: {', '.join(map(str, compared))}")
        return found

    def finish(folder: Path, compared: list[Comparison]) -> int:
        if as_json:
            for each in compared:
                print_text(msgspec.json.encode(each).decode())
        say(_verdict(compared, same=same, path=path))
        return 0

    return run_in_folder(result_folder(out or path / "replay", config), config, run, finish=finish)


async def repeat_step(trainer: Trainer, path: Path, batch: TakenBatch, step: int) -> list[Comparison]:
    """Train a step of a capture once more, and compare it with the run.

    Raises:
        DataError: A frame of its batch is damaged.
    """
    for flaw in (await trainer.read_batch(batch)).values():
        raise DataError(f"the captured batch is damaged: {flaw}")
    return compare_step(load_result(batch_folder(path, step)), await trainer.train_step(batch, step))


def batch_folder(path: Path, step: int) -> Path:
    """Return the folder of a step's batch in a capture."""
    return step_folder(path / kept_batches.FOLDER, step)


def config_of_replay(config: Config) -> Config:
    """Return the config for the ranks, which have their devices to themselves and serve no engine."""
    return replace(
        config,
        placement=replace(config.placement, shared=False),
        weights=WeightsConfig(timeout_s=config.weights.timeout_s),
    )


def load_batches(path: Path, capture: Capture) -> dict[int, TakenBatch]:
    """Return the batches from the checkpoint to the captured step.

    Raises:
        DataError: Some of them are missing.
    """
    there = kept_steps(path / kept_batches.FOLDER)
    wanted = range(capture.base_step + 1, capture.step + 1)
    missing = [step for step in wanted if step not in there]
    if missing:
        start = f"the checkpoint of step {capture.base_step}" if capture.base_step else "the model's weights"
        raise DataError(
            f"{path} lacks the batches of steps {number_ranges(missing)}, without which {start} cannot be "
            f"trained up to step {capture.step}: raise trainer.capture_bytes, or write checkpoints more "
            "often (trainer.checkpoint_every); --until rollout shows the batch of the step alone"
        )
    return {step: load_batch(batch_folder(path, step)) for step in wanted}


def checkpoint_of(path: Path, capture: Capture) -> str | None:
    """Return the checkpoint to start from; None for the weights in `model.path`.

    Raises:
        DataError: It was removed.
    """
    if capture.checkpoint is None:
        return None
    checkpoint = (path / capture.checkpoint).absolute()  # an absolute path replaces `path`
    if not checkpoint.is_dir():
        raise DataError(
            f"the checkpoint {checkpoint} was removed. It was larger than trainer.capture_bytes, so that "
            "the capture did not hold on to it: raise that, or trainer.keep_checkpoints"
        )
    return str(checkpoint)


def compare_step(captured: StepResult | None, replayed: StepResult) -> list[Comparison]:
    """Return the figures of a step that both have or the run lacks; a KL only where it was measured."""
    before: dict[str, float] = {} if captured is None else captured.metrics
    return [
        Comparison(
            step=replayed.step, figure=name, captured=before.get(name), replayed=replayed.metrics[name]
        )
        for name in _SHOWN
        if name in replayed.metrics and (name in _COMPARED or math.isfinite(replayed.metrics[name]))
    ]


def _verdict(compared: Sequence[Comparison], *, same: bool, path: Path) -> str:
    """Return what a replay has shown.

    Raises:
        ReplayDiffers: A figure differs by more than it may.
    """
    last = compared[-1].step
    checked = [each for each in compared if each.figure in _COMPARED and each.captured is not None]
    lost = ""
    if all(each.step != last for each in checked):
        lost = f"step {last} has no result in the run: it failed there, or was still being trained then"
    if not checked:
        return lost
    worst = max(checked, key=lambda each: each.difference)
    if not worst.difference:
        if lost:
            return f"the steps before are reproduced, bit for bit; {lost}"
        return "reproduced: losses, gradient norms and log-probs are those of the run, bit for bit"
    if not same and worst.difference <= TOLERANCE:
        how = f"reproduced with other settings: the largest difference is {worst.difference:.1e}"
        return f"the steps before are {how}; {lost}" if lost else how
    where = f"{worst.figure} of step {worst.step} is {worst.replayed!r} and was {worst.captured!r} in the run"
    limit = f"more than {TOLERANCE} apart" if not same else "expected equal"
    raise ReplayDiffers(f"not reproduced: {where}, {limit}{_changed_versions(path)}")


def _changed_versions(path: Path) -> str:
    """Return how installed packages differ from those of the run, as the end of a sentence."""
    try:
        before = msgspec.json.decode((path / "versions.json").read_bytes(), type=dict[str, str])
    except OSError:
        return ""
    now = versions()
    changed = [f"{name} {old} (here {now.get(name)})" for name, old in before.items() if now.get(name) != old]
    return f"; the run had {', '.join(changed)}" if changed else "; the installed versions are the same"


# -- until the rollout


def _show_batch(batch: TakenBatch, capture: Capture, as_json: bool) -> int:
    """Verify and decode every frame of a batch, and show its groups.

    Raises:
        DataError: A frame is damaged.
    """
    groups: list[dict[str, Any]] = []
    for index, group_id in enumerate(batch.group_ids):
        members = [
            each for each, group in zip(batch.trajectories, batch.group_index, strict=True) if group == index
        ]
        for each in members:
            try:
                columns = frames.read_columns(each)
            except CorruptFrame as error:
                raise DataError(f"the captured batch is damaged: {error}") from error
            if len(columns[frames.TOKEN_IDS]) != each.num_tokens:
                raise DataError(f"{each.path} does not hold the tokens of {each.trajectory_id}")
        sampled_by = {span.weight_version for each in members for span in each.spans}
        groups.append(
            {
                "group": group_id,
                "task": members[0].task_id,
                "attempts": len({root_of(each.trajectory_id) for each in members}),
                "rewards": [each.reward for each in members],
                "tokens": sum(each.num_tokens for each in members),
                "trained_tokens": sum(each.num_trained_tokens(batch.masked_below) for each in members),
                "versions": sorted(sampled_by - {-1}),  # -1: of tokens that were not sampled
                "interruptions": sum(each.num_interruptions for each in members),
            }
        )
    if as_json:
        for group in groups:
            print_text(msgspec.json.encode(group).decode())
        return 0
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("task", no_wrap=True)
    for name in ("attempts", "mean reward", "tokens", "trained", "versions", "interruptions"):
        table.add_column(name, justify="right")
    for group in groups:
        rewards = [reward for reward in group["rewards"] if reward is not None]
        table.add_row(
            group["task"],
            str(group["attempts"]),
            f"{sum(rewards) / len(rewards):.3f}" if rewards else "-",
            f"{group['tokens']:,}",
            f"{group['trained_tokens']:,}",
            number_ranges(group["versions"]),
            str(group["interruptions"]),
        )
    console = run_console()
    console.print(
        f"step {capture.step} of {capture.run}: weights of version {batch.trainer_version}, "
        f"captured because {capture.reason}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    console.print(table)
    console.print(f"{len(batch.trajectories)} frames, {batch.nbytes:,} bytes: all complete", highlight=False)
    return 0
