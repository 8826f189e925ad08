"""The trainer as seen by the orchestrator: calls to all ranks, each with a time limit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
from ray.exceptions import ObjectLostError, OutOfMemoryError, RayError, RayTaskError

from async_rl.config import Config
from async_rl.engine_protocol import GroupInvite, WeightBucket
from async_rl.errors import AsyncRLError, EnvironmentNotReady, NodeUnreachable, TrainerError
from async_rl.runtime.supervision import run_together
from async_rl.trainer_protocol import LagMeasurement, Saved, SendReport, StepResult, Trainer, TrainerState
from async_rl.types import StoredTrajectory, TakenBatch

T = TypeVar("T")

_PORTION_BYTES: Final = 256 << 20
_PORTION_LIMIT_S: Final = 120.0
"""A node puts its frames of a batch into Ray's store in portions of this size or one frame, each within this
time, however large the batch is."""

_MAX_DELIVERIES: Final = 3
"""How often the frames of a batch are sent whose readers end before ranks have read them."""

WEIGHTS: Final = "weights"
"""The concurrency group of a rank's actor that sends weights, in a thread of its own."""

ABORTS: Final = "aborts"
"""That in which sending is aborted."""


CallFrameReader = Callable[..., Coroutine[Any, Any, Any]]
"""Calls the reader of frames on a node, as `FrameReaders.call`."""


class _Delivery(NamedTuple):
    """Frames that a node's reader holds for its ranks."""

    batch: TakenBatch
    """The batch, with these frames where they are held."""
    path: str
    """The file that has them."""


class RayTrainer(Trainer):
    """All trainer ranks; the failure of one is a `TrainerError` that names the rank and its log."""

    def __init__(
        self,
        actors: list[Any],
        nodes: list[str],
        log_paths: list[Path],
        config: Config,
        driver_node: str,
        call_reader: CallFrameReader,
    ) -> None:
        """Call the ranks of a run.

        Args:
            actors: The ranks.
            nodes: The addresses of their nodes.
            log_paths: Their logs.
            config: The time limits.
            driver_node: The address of the driver's node.
            call_reader: Calls the reader of frames on the node with an address.
        """
        self._actors = actors
        self._log_paths = log_paths
        self._config = config
        self._nodes = nodes
        self._driver_node = driver_node
        self._call_reader = call_reader

    async def setup(self, checkpoint_dir: str | None) -> TrainerState:
        """Implement `Trainer.setup` for all ranks."""
        state: TrainerState = await self._call_all(
            self._config.trainer.start_timeout_s, "setup", checkpoint_dir
        )
        return state

    async def read_batch(self, batch: TakenBatch) -> dict[str, str]:
        """Implement `Trainer.read_batch` for all ranks, with frames of other nodes than theirs."""
        limit_s = self._config.trainer.step_timeout_s
        lost: object = None
        for _ in range(_MAX_DELIVERIES):
            try:
                held = await self._deliver_frames(limit_s, batch)
            except ObjectLostError as error:
                lost = last_line(error)
                continue
            of_ranks: list[dict[str, str]] = await self._answers(
                limit_s,
                "read_batch",
                {
                    rank: actor.call_worker.remote("read_batch", held[node].batch if node in held else batch)
                    for rank, (actor, node) in enumerate(zip(self._actors, self._nodes, strict=True))
                },
            )
            flaws = {name: flaw for of_rank in of_ranks for name, flaw in of_rank.items()}
            if not flaws or all(await self._are_held(limit_s, held)):
                return flaws
            lost = flaws
        raise TrainerError(f"frames were lost with their readers before ranks had read them: {lost}")

    async def train_step(self, batch: Any, step: int) -> StepResult:
        """Implement `Trainer.train_step` for all ranks."""
        result: StepResult = await self._call_all(
            self._config.trainer.step_timeout_s, "train_step", batch, step
        )
        return result

    async def measure_lags(self, batch: TakenBatch) -> LagMeasurement:
        """Implement `Trainer.measure_lags` for all ranks."""
        passes = len({span.weight_version for each in batch.trajectories for span in each.spans})
        limit_s = self._config.trainer.step_timeout_s * (1 + passes)
        measured: LagMeasurement = await self._call_all(limit_s, "measure_lags", batch)
        return measured

    async def _are_held(self, limit_s: float, held: Mapping[str, _Delivery]) -> Iterable[bool]:
        """Return for each node whether its reader still holds what it did: else no frame is damaged."""
        calls = {node: self._call_reader(node, "holds", each.path) for node, each in held.items()}
        return (await _on_nodes(limit_s, calls)).values()

    async def _deliver_frames(self, limit_s: float, batch: TakenBatch) -> dict[str, _Delivery]:
        """Send to each node the frames that its ranks read and that another node has.

        Frames in the run's folder are sent to none: all nodes share it, and ranks read them there. The reader
        of the node that has a frame puts it into Ray's store, once. The readers of other nodes get it from
        there and hold it in memory that their ranks map. The objects are freed after this call.

        Returns:
            What is held, by node that was sent any.

        Raises:
            NodeUnreachable: A node that has some, other than the driver's, does not answer.
            TrainerError: A node does not send or take them.
            ObjectLostError: A reader that had sent some has ended before another one had them.
        """
        places = [each.node for each in batch.trajectories]
        ranks = {rank: node for rank, node in enumerate(self._nodes) if set(places) - {node, ""}}
        if not ranks:
            return {}
        plans = await self._answers(
            limit_s,
            "the plan of a batch",
            {rank: self._actors[rank].call_worker.remote("needed_trajectories", batch) for rank in ranks},
        )
        needed: dict[str, set[int]] = {}
        for node, plan in zip(ranks.values(), plans, strict=True):
            needed.setdefault(node, set()).update(index for index in plan if places[index] not in (node, ""))
        by_source: dict[str, list[int]] = {}
        for index in sorted(set().union(*needed.values())):
            by_source.setdefault(places[index], []).append(index)

        async def send(node: str, indices: list[int]) -> list[Any]:
            objects: list[Any] = []
            try:
                for portion in _portions(batch.trajectories[index] for index in indices):
                    async with asyncio.timeout(_PORTION_LIMIT_S):
                        objects += await self._call_reader(node, "send_frames", portion)
            except (RayError, NodeUnreachable, TimeoutError) as error:
                if node == self._driver_node or _is_fault_of_reader(error):
                    raise
                unreachable = NodeUnreachable(
                    f"node {node} does not send the frames that it has: {last_line(error)}"
                )
                unreachable.node = node
                raise unreachable from error
            return objects

        async def hold(node: str, indices: list[int]) -> _Delivery:
            chosen = [objects[index] for index in indices]
            path, offsets = await self._call_reader(node, "hold_frames", chosen)
            return _Delivery(_relocated(batch, indices, path, offsets), path)

        sent = await _on_nodes(limit_s, {node: send(node, each) for node, each in by_source.items()})
        objects = {
            index: reference
            for node, indices in by_source.items()
            for index, reference in zip(indices, sent[node], strict=True)
        }
        wanted = {node: sorted(indices) for node, indices in needed.items() if indices}
        return await _on_nodes(limit_s, {node: hold(node, indices) for node, indices in wanted.items()})

    async def take_snapshot(self, weight_version: int) -> None:
        """Implement `Trainer.take_snapshot` for all ranks."""
        await self._call_all(self._config.weights.timeout_s, "take_snapshot", weight_version)

    async def publish(self, directory: str, weight_version: int) -> None:
        """Implement `Trainer.publish` for all ranks."""
        await self._call_weight_ranks(self._config.weights.timeout_s, "publish", directory, weight_version)

    async def publish_delta(self, path: str, base: int | None, weight_version: int) -> bool:
        """Implement `Trainer.publish_delta` for all ranks."""
        written: bool = await self._call_weight_ranks(
            self._config.weights.timeout_s, "publish_delta", path, base, weight_version
        )
        return written

    async def open_weight_group(self, invite: GroupInvite) -> None:
        """Implement `Trainer.open_weight_group` for all ranks."""
        await self._call_weight_ranks(self._config.weights.timeout_s, "open_weight_group", invite)

    async def close_weight_group(self, group_name: str) -> None:
        """Implement `Trainer.close_weight_group` for all ranks."""
        await self._call_weight_ranks(self._config.weights.timeout_s, "close_weight_group", group_name)

    async def plan_buckets(self, bucket_bytes: int) -> tuple[WeightBucket, ...]:
        """Implement `Trainer.plan_buckets` for all ranks."""
        plan: tuple[WeightBucket, ...] = await self._call_weight_ranks(
            self._config.weights.timeout_s, "plan_buckets", bucket_bytes
        )
        return plan

    async def abort_weight_group(self, group_name: str) -> None:
        """Implement `Trainer.abort_weight_group` for all ranks, which may be sending."""
        calls = [
            actor.call_worker.options(concurrency_group=ABORTS).remote("abort_weight_group", group_name)
            for actor in self._actors
        ]
        await self._gather(self._config.weights.timeout_s, "abort_weight_group", calls)

    async def send_weights(self, group_names: list[str], bucket_bytes: int) -> SendReport:
        """Implement `Trainer.send_weights` for all ranks."""
        # The ranks limit each broadcast and skip dead engines; this limit is for a dead trainer.
        reports: list[SendReport] = await self._call_weight_ranks(
            2 * self._config.weights.timeout_s, "send_weights", group_names, bucket_bytes, of_all=True
        )
        return SendReport.of_slowest(reports)

    async def checksums(self) -> dict[str, str]:
        """Implement `Trainer.checksums` for all ranks."""
        sums: dict[str, str] = await self._call_weight_ranks(self._config.weights.timeout_s, "checksums")
        return sums

    async def share_bucket(self, number: int, bucket_bytes: int, ranks: list[int]) -> list[bytes]:
        """Implement `Trainer.share_bucket` for all ranks."""
        payloads: list[list[bytes]] = await self._call_weight_ranks(
            self._config.weights.timeout_s, "share_bucket", number, bucket_bytes, ranks, of_all=True
        )
        of_rank = [iter(each) for each in payloads]
        return [next(of_rank[rank]) for rank in ranks]

    async def offload(self, keep_weights: bool = False) -> None:
        """Implement `Trainer.offload` for all ranks."""
        await self._call_all(self._config.weights.timeout_s, "offload", keep_weights)

    async def reload(self) -> None:
        """Implement `Trainer.reload` for all ranks."""
        await self._call_all(self._config.weights.timeout_s, "reload")

    async def save_checkpoint(self, directory: str, extra: dict[str, Any]) -> None:
        """Implement `Trainer.save_checkpoint` for all ranks."""
        await self._call_all(self._config.trainer.step_timeout_s, "save_checkpoint", directory, extra)

    async def saved_checkpoint(self, wait: bool) -> Saved:
        """Implement `Trainer.saved_checkpoint` for all ranks."""
        saved: Saved = await self._call_all(self._config.trainer.step_timeout_s, "saved_checkpoint", wait)
        return saved

    async def close(self) -> None:
        """Stop all ranks."""
        await self._call_all(self._config.weights.timeout_s, "close")

    async def _call_all(self, limit_s: float, method: str, *arguments: Any) -> Any:
        return await self._gather(
            limit_s, method, [actor.call_worker.remote(method, *arguments) for actor in self._actors]
        )

    async def _call_weight_ranks(
        self, limit_s: float, method: str, *arguments: Any, of_all: bool = False
    ) -> Any:
        """Call all ranks; with `weights.overlap` only rank 0, which has the copy, in its own thread.

        Returns:
            Rank 0's answer, or with `of_all` a list of all.
        """
        calls = [each.call_worker for each in self._actors]
        if self._config.weights.overlap:
            calls = [calls[0].options(concurrency_group=WEIGHTS)]
        references = dict(enumerate(call.remote(method, *arguments) for call in calls))
        answers = await self._answers(limit_s, method, references)
        return answers if of_all else answers[0]

    async def _gather(self, limit_s: float, method: str, references: list[Any]) -> Any:
        """Wait for all ranks and return rank 0's answer. The first rank that fails fails the call."""
        return (await self._answers(limit_s, method, dict(enumerate(references))))[0]

    async def _answers(self, limit_s: float, method: str, references: dict[int, Any]) -> list[Any]:
        """Wait for some ranks and return their answers. The first rank that fails fails the call."""

        async def answer(rank: int, reference: Any) -> Any:
            try:
                return await reference
            except RayTaskError as error:
                failure = TrainerError(
                    f"trainer rank {rank} failed in {method}: {last_line(error)}; see {self._log_paths[rank]}"
                )
                raise cause_of(error, failure) from error
            except RayError as error:  # of its process: killed, out of memory, on a lost node
                how = " by Ray's memory monitor" if isinstance(error, OutOfMemoryError) else ""
                raise TrainerError(
                    f"trainer rank {rank} died during {method}{how}; see the end of {self._log_paths[rank]}"
                ) from error

        try:
            async with asyncio.timeout(limit_s):
                return await run_together(
                    (f"trainer rank {rank}", answer(rank, each)) for rank, each in references.items()
                )
        except TimeoutError as error:
            raise TrainerError(
                f"the trainer took more than {limit_s} s for {method}; see {self._log_paths[0]}"
            ) from error


def _portions(stored: Iterable[StoredTrajectory]) -> Iterator[list[StoredTrajectory]]:
    """Divide frames into portions of `_PORTION_BYTES` at most, or of one frame."""
    portion: list[StoredTrajectory] = []
    free_bytes = _PORTION_BYTES
    for each in stored:
        if portion and each.nbytes > free_bytes:
            yield portion
            portion, free_bytes = [], _PORTION_BYTES
        portion.append(each)
        free_bytes -= each.nbytes
    if portion:
        yield portion


async def _on_nodes(limit_s: float, calls: Mapping[str, Coroutine[Any, Any, T]]) -> dict[str, T]:
    """Wait for the readers of frames on some nodes; the first that fails fails the call.

    Raises:
        NodeUnreachable: One failed with this error about a node that the caller can wait for.
        ObjectLostError: One was sent objects that are lost.
        TrainerError: One failed otherwise: the ranks start again.
    """

    async def answer(node: str, call: Coroutine[Any, Any, T]) -> T:
        try:
            return await call
        except (RayError, NodeUnreachable, TimeoutError) as error:
            if isinstance(error, ObjectLostError) or (isinstance(error, NodeUnreachable) and error.node):
                raise
            raise TrainerError(
                f"frames of the batch could not be sent by or to node {node}: {last_line(error)}"
            ) from error

    try:
        async with asyncio.timeout(limit_s):
            answers = await run_together((f"frames of {n}", answer(n, call)) for n, call in calls.items())
    except TimeoutError as error:
        raise TrainerError(f"the frames of a batch took more than {limit_s} s to their nodes") from error
    return dict(zip(calls, answers, strict=True))


def _is_fault_of_reader(error: Exception) -> bool:
    """Return whether a reader's call failed and would fail again: not for want of memory or descriptors."""
    return isinstance(error, RayTaskError) and not isinstance(error.cause, RayError | OSError)


def _relocated(batch: TakenBatch, indices: Sequence[int], path: str, offsets: Sequence[int]) -> TakenBatch:
    """Return a batch with some of its frames at offsets of another file."""
    trajectories = list(batch.trajectories)
    for index, offset in zip(indices, offsets, strict=True):
        trajectories[index] = msgspec.structs.replace(trajectories[index], path=path, offset=offset)
    return msgspec.structs.replace(batch, trajectories=tuple(trajectories))


async def make_worker(actor: Any, *arguments: Any) -> None:
    """Make a rank's actor construct its worker.

    Raises:
        AsyncRLError: The worker's error, or `EnvironmentNotReady`.
    """
    try:
        await actor.make_worker.remote(*arguments)
    except RayTaskError as error:
        failure = EnvironmentNotReady(f"a trainer rank could not construct its worker: {last_line(error)}")
        raise cause_of(error, failure) from error


def cause_of(error: Exception, otherwise: AsyncRLError) -> AsyncRLError:
    """Return this package's error as it was raised in the actor, or `otherwise`."""
    ours = isinstance(error, RayTaskError) and isinstance(error.cause, AsyncRLError)
    return error.cause if ours else otherwise  # type: ignore[attr-defined]


def last_line(error: Exception) -> str:
    """Return the last line of Ray's long messages, which has the cause; the error's type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
