"""Captures of trained steps: a batch with all that `async-rl replay-step` needs to train it once more.

```
runs/NAME/
  batches/step_00000041/ … 44/    batches since the last checkpoint, up to trainer.capture_bytes
  captures/step_00000044/         hard links, so that nothing is copied and nothing of it is deleted early
    capture.json                  which step, why, and from which checkpoint it is trained
    config.yaml, versions.json    of the run
    batches/step_00000041/ … 44/
    checkpoint/step_00000040/     none: from the weights in model.path
```

The driver decides which batches are kept, and the ranks keep them (`store.kept_batches`). It captures a step
that fails, that skips an update, or whose gradient norm or ppo_kl (`ppo_kl_bypass` where the engines'
log-probs are the old ones) jumps; `async-rl capture` does so on request.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final

import msgspec
from msgspec.structs import replace

from async_rl.config import Config
from async_rl.config.reference import resolved_yaml
from async_rl.errors import ConfigError, DataError
from async_rl.observability.formatting import number_ranges
from async_rl.run import checkpoints
from async_rl.runtime.files import replace_file
from async_rl.runtime.threads import run_to_end
from async_rl.store import kept_batches
from async_rl.store.kept_batches import kept_steps, load_batch, load_result, step_folder
from async_rl.trainer_protocol import StepResult
from async_rl.types import TakenBatch

log = logging.getLogger(__name__)

FOLDER: Final = "captures"
"""Subfolder of the run's folder."""

MANIFEST: Final = "capture.json"

_VERSIONS: Final = "versions.json"

_KEPT: Final = 3
"""Captures that a run keeps of those that it makes itself: more of the same cause show nothing new."""

_HISTORY: Final = 20
"""Steps whose median a step is compared with."""

_MIN_HISTORY: Final = 5
"""Steps before the first comparison."""

_JUMP: Final = 5.0
"""A step whose value is more than this many times the median is captured: usual steps stay within twice."""

_LEAST_JUMP: Final = {"grad_norm": 0.0, "ppo_kl": 0.01, "ppo_kl_bypass": 0.01}
"""What is compared, and the size (of a KL: in nats) that it must exceed to count as a jump: medians near 0
are exceeded by noise."""


class Capture(msgspec.Struct, frozen=True, kw_only=True):
    """The manifest of a capture."""

    run: str
    """The run's folder."""
    step: int
    reason: str
    unix_s: float
    requested: bool
    """Whether `async-rl capture` made it; newer ones replace the others."""
    base_step: int
    """The step of the checkpoint that a replay starts from; 0: the weights in `model.path`."""
    checkpoint: str | None
    """Its path, relative to the capture or, of one that is too large to hold on to, absolute."""


class Captures:
    """Decides for one incarnation of the trainer which batches are kept, and which steps are captured."""

    def __init__(self, config: Config, run_dir: Path, step: int) -> None:
        """Remove what an earlier incarnation kept, whose steps were undone or are in the checkpoint.

        Args:
            config: The run's config; `trainer.capture_bytes` says how much is kept.
            run_dir: The run's folder.
            step: The step that the trainer continues from.
        """
        self._config = config
        self._run_dir = run_dir.absolute()
        self._batches = self._run_dir / kept_batches.FOLDER
        shutil.rmtree(self._batches, ignore_errors=True)
        self._kept: dict[int, int] = {}
        """Bytes of the batches that are kept, by step."""
        self._base_step = step
        self._history = {name: deque[float](maxlen=_HISTORY) for name in _LEAST_JUMP}

    def keep_batch(self, batch: TakenBatch, step: int) -> TakenBatch:
        """Return the batch of a step, with the folder in which the trainer's ranks keep it if there is space.

        The first batches after a checkpoint are kept rather than the last: a step can be repeated only with
        all batches since the checkpoint.
        """
        limit = self._config.trainer.capture_bytes
        if sum(self._kept.values()) + batch.nbytes > limit:
            if limit and step - 1 in {self._base_step, *self._kept}:
                log.info(
                    "steps from %d to the next checkpoint cannot be replayed: their batches would exceed "
                    "trainer.capture_bytes = %d",
                    step,
                    limit,
                )
            return batch
        self._kept[step] = batch.nbytes
        return replace(batch, kept_in=str(step_folder(self._batches, step)))

    async def observe_step(self, result: StepResult, checkpoint_step: int) -> None:
        """Capture a step if it is one to look at, and remove the batches that a checkpoint covers.

        Args:
            result: The result of a step.
            checkpoint_step: The step of the newest complete checkpoint.
        """
        covered = [step for step in self._kept if step <= checkpoint_step]
        self._base_step = checkpoint_step
        for step in covered:
            del self._kept[step]
        if covered and self._batches.is_dir():
            await _in_thread(lambda: _remove(step_folder(self._batches, step) for step in covered))
        reason = self._find_reason(result)
        if reason:
            await self.capture_step(result.step, reason)

    async def capture_step(self, step: int, reason: str) -> None:
        """Capture a step whose batch is kept; one whose batch is not kept is logged. Raises no OSError."""
        if step not in self._kept or not step_folder(self._batches, step).is_dir():
            log.info("step %d is not captured, because its batch is not kept: %s", step, reason)
            return
        work = partial(
            write_capture,
            self._config,
            self._run_dir,
            step,
            reason,
            base_step=self._base_step,
            max_checkpoint_bytes=self._config.trainer.capture_bytes,
        )

        def capture() -> None:
            path = work()
            _remove(_superseded(path.parent, _KEPT))
            log.warning("captured step %d: %s; repeat it with: async-rl replay-step %s", step, reason, path)

        await _in_thread(capture)

    def _find_reason(self, result: StepResult) -> str | None:
        """Return why a step is captured; None for an ordinary one."""
        metrics = result.metrics
        reasons = []
        if metrics.get("updates_skipped"):
            reasons.append(f"{metrics['updates_skipped']:.0f} updates were skipped")
        for name, history in self._history.items():
            value = abs(metrics.get(name, float("nan")))
            usual = median(history) if len(history) >= _MIN_HISTORY else 0.0
            if usual and value > max(_JUMP * usual, _LEAST_JUMP[name]):
                reasons.append(f"{name} is {value:.3g}, {value / usual:.1f} times its median")
            if value < float("inf"):
                history.append(value)
        return "; ".join(reasons) or None


def write_capture(
    config: Config,
    run_dir: Path,
    step: int,
    reason: str,
    *,
    base_step: int | None = None,
    max_checkpoint_bytes: int | None = None,
    requested: bool = False,
) -> Path:
    """Write the capture of a step whose batch is kept; blocking.

    Args:
        config: The run's config.
        run_dir: The run's folder.
        step: The step.
        reason: Why it is captured.
        base_step: The step of the newest checkpoint before it; None searches the run's folder.
        max_checkpoint_bytes: A larger checkpoint is only referred to, so that it can be removed; None: none
            is too large.
        requested: `Capture.requested`.

    Returns:
        The folder of the capture.

    Raises:
        ConfigError: The batch of the step is not kept, or not completely yet.
        OSError: The capture cannot be written.
    """
    run_dir = run_dir.absolute()
    batches, saved = run_dir / kept_batches.FOLDER, run_dir / checkpoints.FOLDER
    kept = kept_steps(batches)
    if step not in kept:
        raise ConfigError(
            f"the batch of step {step} is not kept in {batches}; kept are: {number_ranges(kept) or 'none'}. "
            "Batches are kept from a checkpoint to the next, within trainer.capture_bytes"
        )
    try:
        load_batch(step_folder(batches, step))
    except DataError as error:
        raise ConfigError(
            f"the batch of step {step} is still being written, or the trainer failed meanwhile: {error}. "
            f"Capture it after its step, or an earlier one (--step N); kept are: {number_ranges(kept)}"
        ) from error
    if base_step is None:
        base_step = max((each for each in kept_steps(saved) if each < step), default=0)
    target = step_folder(run_dir / FOLDER, step)
    scratch = target.with_name(f".{target.name}.tmp")
    _remove([scratch])
    scratch.mkdir(mode=0o700, parents=True)
    checkpoint = None
    if base_step:
        source = step_folder(saved, base_step)
        checkpoint = str(source)
        size = sum(path.stat().st_size for path in source.rglob("*"))
        if source.is_dir() and (max_checkpoint_bytes is None or size <= max_checkpoint_bytes):
            checkpoint = f"checkpoint/{source.name}"
            _link_folder(source, scratch / checkpoint)
    for each in kept:
        if base_step < each <= step:
            folder = step_folder(batches, each)
            _link_folder(folder, scratch / kept_batches.FOLDER / folder.name)
    model = replace(config.model, path=str(Path(config.model.path).absolute()))
    replace_file(scratch / "config.yaml", resolved_yaml(replace(config, model=model)).encode())
    if (run_dir / _VERSIONS).exists():
        shutil.copy(run_dir / _VERSIONS, scratch)
    manifest = Capture(
        run=str(run_dir),
        step=step,
        reason=reason,
        unix_s=time.time(),
        requested=requested,
        base_step=base_step,
        checkpoint=checkpoint,
    )
    replace_file(scratch / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))
    _remove([target])
    scratch.rename(target)
    return target


def newest_kept_step(run_dir: Path) -> int:
    """Return the newest step of a run whose batch is kept and whose result is known.

    Without any result, the newest step: that of a run that failed in its first one.

    Raises:
        ConfigError: There is none.
    """
    batches = run_dir / kept_batches.FOLDER
    kept = kept_steps(batches)
    if not kept:
        raise ConfigError(
            f"{batches} has no batch: they are kept from a checkpoint to the next, "
            "within trainer.capture_bytes"
        )
    trained = [step for step in kept if load_result(step_folder(batches, step)) is not None]
    return (trained or kept)[-1]


def load_capture(folder: Path) -> Capture:
    """Return the manifest of a capture.

    Raises:
        ConfigError: The folder holds none.
    """
    try:
        return msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Capture)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"{folder} is no capture ({error}): name a folder in RUN/{FOLDER}, which `async-rl capture RUN` "
            "adds to"
        ) from error


async def _in_thread(work: Callable[[], None]) -> None:
    """Do file work in a thread; what the file system refuses is logged, because the run can do without."""

    def attempt() -> None:
        try:
            work()
        except (OSError, ConfigError) as error:
            log.warning("captures: %s", error)

    await run_to_end(attempt)


def _superseded(folder: Path, keep: int) -> list[Path]:
    """Return all but the newest automatic captures."""
    automatic = []
    for path in (step_folder(folder, step) for step in kept_steps(folder)):
        manifest = load_capture(path)
        if not manifest.requested:
            automatic.append((manifest.unix_s, path))
    return [path for _, path in sorted(automatic)[:-keep]]


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)


def _link_folder(source: Path, target: Path) -> None:
    """Create a folder with the same files; on a file system without hard links they are copied."""

    def link(old: str, new: str) -> None:
        try:
            os.link(old, new)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK):
                raise
            shutil.copyfile(old, new)

    shutil.copytree(source, target, copy_function=link)
