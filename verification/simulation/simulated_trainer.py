"""A trainer that takes time: what it is given goes to the checker, its step into the run's folder."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any, Final, Literal, NoReturn

import msgspec

from async_rl.config import Config
from async_rl.engine_protocol import GroupInvite, TensorSpec, WeightBucket, group_of
from async_rl.errors import InvariantError, TrainerError
from async_rl.observability.records import FIGURES
from async_rl.runtime.files import replace_file
from async_rl.runtime.supervision import run_together
from async_rl.store.frames import find_flaws, read_trajectories
from async_rl.trainer_protocol import Saved, SendReport, StepResult, TrainerState
from async_rl.types import TakenBatch, TrainBatch
from verification.diary import Entry, SetUp, saving, trained, write
from verification.simulation.broadcasts import Broadcasts
from verification.simulation.faults import FaultKind
from verification.simulation.invariant_checker import InvariantChecker
from verification.simulation.scenario import Speeds

_ASKS_EVERY_S: Final = 1.0
"""Between two questions whether a step may end."""


class _Writing(msgspec.Struct):
    """A checkpoint that is being written beside the training."""

    directory: Path
    step: int
    end_s: float
    """On the loop's clock."""
    fails: bool
    stands: bool = False


class SimulatedTrainer:
    """Implements `async_rl.trainer_protocol.Trainer`."""

    def __init__(
        self,
        config: Config,
        speeds: Speeds,
        checker: InvariantChecker,
        broadcasts: Broadcasts,
        look: Callable[[], None],
    ) -> None:
        """Start at step 0.

        Args:
            config: Of the run.
            speeds: How long things take.
            checker: Who looks at every batch.
            broadcasts: Where engines listen.
            look: Called before each step and each checkpoint.
        """
        self._config = config
        self._speeds = speeds
        self._checker = checker
        self._broadcasts = broadcasts
        self._look = look
        self._step = 0
        self.holds: Literal["all", "weights", "nothing"] = "nothing"
        """What it holds of its devices; before `setup` there is no process."""
        self._writing: _Writing | None = None
        self._snapshot: int | None = None
        """The version of the copy."""
        self._readers = 0
        self._read: tuple[tuple[str, ...], TrainBatch] | None = None
        self._kept: int | None = None
        """The version that a delta can be of."""
        self.faults: list[FaultKind] = []
        """To come, in order."""
        self.own_files: Callable[[], AbstractContextManager[object]] = nullcontext
        """A context in which files can be opened: the ranks are other processes than the driver."""
        self.require_node: Callable[[str], None] = lambda node: None
        """Raises `NodeUnreachable` where a node does not answer."""
        self.may_end: Callable[[], bool] = lambda: True
        """Whether a step may end; asked until it may."""
        self.diary: Path | None = None
        """The file in which it notes what it did."""

    @property
    def step(self) -> int:
        """Steps done."""
        return self._step

    async def setup(self, checkpoint_dir: str | None) -> TrainerState:
        """Implements `Trainer.setup`."""
        self._step = _newest_step(Path(checkpoint_dir or ""))
        self._snapshot, self._readers = None, 0
        self._read = None
        self._writing = self._kept = None
        self._checker.restored(self._step)
        self._note(SetUp(step=self._step))
        self.holds = "all"
        return TrainerState(step=self._step)

    async def read_batch(self, batch: TakenBatch) -> dict[str, str]:
        """Implements `Trainer.read_batch`."""
        self._read = None
        await asyncio.sleep(self._speeds.latency_s)
        for node in sorted({trajectory.node for trajectory in batch.trajectories}):
            self.require_node(node)
        with self.own_files():
            if flaws := find_flaws(batch.trajectories):
                return flaws
            self._read = batch.trajectory_ids, read_trajectories(batch)
        return {}

    async def measure_lags(self, batch: TakenBatch) -> NoReturn:
        """Implements `Trainer.measure_lags`."""
        raise AssertionError("a simulated trainer has no gradients")

    async def train_step(self, batch: TakenBatch, step: int) -> StepResult:
        """Implements `Trainer.train_step`."""
        self._look()
        self._needs_memory("train")
        fault = self._fault("step_fails", "step_is_nan", "step_is_slow")
        slow = 10.0 if fault == "step_is_slow" else 1.0
        read, self._read = self._read, None
        if read is None or read[0] != batch.trajectory_ids:
            raise InvariantError(f"{batch.batch_id} is trained and was not read")
        tokens = read[1]
        try:
            await asyncio.sleep(slow * self._speeds.train_s)
            while not self.may_end():  # noqa: ASYNC110 - time is virtual
                await asyncio.sleep(_ASKS_EVERY_S)
        finally:
            # A step that remote ranks have begun continues even if its caller stops waiting.
            if fault != "step_fails":
                self._checker.trains(tokens, self._step, step)
                self._note(trained(batch, tokens, step))
                self._step = step
        if fault == "step_fails":
            raise TrainerError("the simulated trainer broke")
        figures: dict[str, float] = dict.fromkeys(FIGURES, 0.0)
        if fault == "step_is_nan":
            figures["loss"] = math.nan
        figures |= {
            "tokens": batch.num_tokens,
            "trained_tokens": int(tokens.loss_mask.sum()),
            "routing_rows": 0
            if tokens.routing_valid is None
            else tokens.num_tokens - tokens.num_trajectories,
            "step_s": self._speeds.train_s,
        }
        return StepResult(step=step, metrics=figures)

    async def take_snapshot(self, weight_version: int) -> None:
        """Implements `Trainer.take_snapshot`."""
        if self._readers:
            self._checker.fail(f"the copy of version {self._snapshot} is overwritten while it is read")
        if self._step % 2 and self._fault("publish_fails"):
            raise TrainerError("the simulated trainer could not copy its weights")
        await asyncio.sleep(self._speeds.update_s / 4)
        if weight_version != self._step:
            self._checker.fail(f"version {weight_version} is copied from a trainer at step {self._step}")
        self._snapshot = weight_version

    @asynccontextmanager
    async def _giving_away(self) -> AsyncIterator[Callable[[], int]]:
        """Weights are read; which version they are, at any moment in between."""
        self._readers += 1
        try:
            yield lambda: self._step if self._snapshot is None else self._snapshot
        finally:
            self._readers -= 1

    async def publish(self, directory: str, weight_version: int) -> None:
        """Implements `Trainer.publish`."""
        fault = self._fault("publish_fails")
        self._needs_memory("publish", "weights")
        async with self._giving_away() as version:
            await asyncio.sleep(self._speeds.update_s)
            if fault is not None:
                raise TrainerError("the simulated trainer could not publish")
            if weight_version != version():
                self._checker.fail(f"version {weight_version} is published from weights of {version()}")
            _write(Path(directory) / "weights", self._checker.weights_of(weight_version).encode())

    async def publish_delta(self, path: str, base: int | None, weight_version: int) -> bool:
        """Implements `Trainer.publish_delta`."""
        fault = self._fault("publish_fails")
        self._needs_memory("publish")
        base, self._kept = base if base == self._kept else None, None
        async with self._giving_away() as version:
            await asyncio.sleep(self._speeds.update_s)
            if fault is not None:
                raise TrainerError("the simulated trainer could not publish a delta")
            if weight_version != version():
                self._checker.fail(f"version {weight_version} is a delta from weights of {version()}")
            if base is not None:
                both = self._checker.weights_of(base), self._checker.weights_of(weight_version)
                _write(Path(path), " ".join(both).encode())
            self._kept = weight_version
            return base is not None

    async def offload(self, keep_weights: bool = False) -> None:
        """Implements `Trainer.offload`."""
        if self._fault("offload_fails"):
            raise TrainerError("the simulated trainer could not move its memory to the host")
        try:
            await asyncio.sleep(self._speeds.update_s / 4)
        finally:  # remote ranks go on even if their caller stops waiting
            self.holds = "weights" if keep_weights and self.holds != "nothing" else "nothing"

    async def reload(self) -> None:
        """Implements `Trainer.reload`."""
        if self._fault("reload_fails"):
            raise TrainerError("the simulated trainer could not take its memory back")
        self.holds = "all"
        await asyncio.sleep(self._speeds.update_s / 4)

    def _needs_memory(self, doing: str, least: Literal["all", "weights"] = "all") -> None:
        if self.holds not in ("all", least):
            self._checker.fail(f"the trainer is to {doing}, and holds {self.holds} of its devices")

    async def save_checkpoint(self, directory: str, extra: dict[str, Any]) -> None:
        """Implements `Trainer.save_checkpoint`."""
        self._look()
        self._needs_memory("copy its state")
        self._note(saving(self._step, directory))
        await asyncio.sleep(self._speeds.latency_s)
        if extra["weight_version"] != self._step:
            self._checker.fail(f"the checkpoint {extra} is of a trainer at step {self._step}")
        end_s = asyncio.get_running_loop().time() + self._speeds.train_s / 2
        self._writing = _Writing(
            Path(directory), self._step, end_s, self._fault("checkpoint_fails") is not None
        )
        if self._step % 2:
            self._finish_writing()  # it may stand for long before anybody knows

    async def saved_checkpoint(self, wait: bool) -> Saved:
        """Implements `Trainer.saved_checkpoint`."""
        if self._writing is not None:
            left_s = self._writing.end_s - asyncio.get_running_loop().time()
            if left_s > 0 and not wait:
                return Saved(writing=True)
            await asyncio.sleep(max(left_s, 0.0))
            self._finish_writing()
            failed, self._writing = self._writing.fails, None
            return Saved(failure="the simulated trainer could not write a checkpoint" if failed else None)
        return Saved()

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint has been begun and is not complete."""
        return self._writing is not None and not self._writing.stands

    def _finish_writing(self) -> None:
        writing = self._writing
        if writing is not None and not writing.fails and not writing.stands:
            writing.stands = True
            older = set(writing.directory.glob("step_*"))
            newest = writing.directory / f"step_{writing.step:08d}"
            newest.mkdir(exist_ok=True)
            for path in older - {newest}:
                path.rmdir()
            self._checker.saved(writing.step)

    async def open_weight_group(self, invite: GroupInvite) -> None:
        """Implements `Trainer.open_weight_group`."""
        await self._broadcasts.open(invite)

    async def close_weight_group(self, group_name: str) -> None:
        """Implements `Trainer.close_weight_group`."""

    async def plan_buckets(self, bucket_bytes: int) -> tuple[WeightBucket, ...]:
        """Implements `Trainer.plan_buckets`."""
        tensors = (TensorSpec(name=f"w{i}", dtype="float32", shape=(1,)) for i in range(3))
        return tuple(WeightBucket(0, (each,)) for each in tensors)

    async def abort_weight_group(self, group_name: str) -> None:
        """Implements `Trainer.abort_weight_group`."""
        self._broadcasts.abort(group_name, "the driver has aborted the update")

    async def send_weights(self, group_names: list[str], bucket_bytes: int) -> SendReport:
        """See `Trainer.send_weights`: one group's failure is not another's."""
        fault = None if self._snapshot is None else self._fault("publish_fails")
        async with self._giving_away() as version:
            await asyncio.sleep(self._speeds.update_s)
            if fault is not None:
                raise TrainerError("the simulated trainer died while it sent weights")
            weights = self._checker.weights_of(version())
            silent = await run_together(
                (f"send to {name}", self._broadcasts.send(name, weights)) for name in group_names
            )
        return SendReport(
            silent={
                group_of(name, 0): ranks for name, ranks in zip(group_names, silent, strict=True) if ranks
            }
        )

    async def checksums(self) -> dict[str, str]:
        """Implements `Trainer.checksums`."""
        self._needs_memory("sum its weights", "weights")
        await asyncio.sleep(self._speeds.update_s / 4)
        return {"weights": str(self._step)}

    async def share_bucket(self, number: int, bucket_bytes: int, ranks: list[int]) -> list[bytes]:
        """See `Trainer.share_bucket`: what is shared says which version it is of."""
        self._needs_memory("share its weights", "weights")
        if (self._snapshot is not None or self.holds == "weights") and self._fails_in(number):
            raise TrainerError("the simulated trainer died while it sent weights")
        async with self._giving_away() as version:
            await asyncio.sleep(self._speeds.update_s / 3)
            return [self._checker.weights_of(version()).encode()] * len(ranks)

    def _fails_in(self, bucket: int) -> bool:
        """Whether it dies in this bucket: in any but the first, so that engines have part of the weights."""
        return bucket > 0 and self._fault("publish_fails") is not None

    async def close(self) -> None:
        """Implements `Trainer.close`."""

    def _note(self, entry: Entry) -> None:
        if self.diary is not None and not self._checker.deaf:
            write(self.diary, entry)

    def _fault(self, *kinds: FaultKind) -> FaultKind | None:
        for index, kind in enumerate(self.faults):
            if kind in kinds:
                self._checker.met(kind)
                return self.faults.pop(index)
        return None


def _newest_step(checkpoints: Path) -> int:
    return max((int(path.name[5:]) for path in checkpoints.glob("step_*")), default=0)


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, data)
