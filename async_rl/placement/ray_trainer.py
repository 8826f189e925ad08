"""The trainer as the orchestrator knows it: calls to all ranks, each within its time."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final

import numpy as np
import ray
from ray.exceptions import RayActorError, RayTaskError

from async_rl.config import Config
from async_rl.engine_protocol import GroupInvite, TensorSpec
from async_rl.errors import AsyncRLError, EnvironmentNotReady, TrainerError
from async_rl.runtime.supervision import Nursery
from async_rl.trainer_protocol import Saved, StepResult, Trainer, TrainerState

WEIGHTS: Final = "weights"
"""The concurrency group of a rank's actor (a thread of its own) that gives weights away."""


class RayTrainer(Trainer):
    """All trainer ranks; a failure of one is a `TrainerError` that names it and its log."""

    def __init__(self, actors: list[Any], nodes: list[str], log_paths: list[Path], config: Config) -> None:
        self._actors = actors
        self._log_paths = log_paths
        self._config = config
        here = ray.get_runtime_context().get_node_id()
        self._nodes = nodes
        self._holders = {node: nodes.index(node) for node in nodes if node != here}
        """By node other than the driver's: the rank that holds batches for all ranks there."""

    async def setup(self, checkpoint_dir: str | None) -> TrainerState:
        """See `TrainerRank.setup`."""
        state: TrainerState = await self._all(self._config.trainer.start_timeout_s, "setup", checkpoint_dir)
        return state

    async def train_step(self, batch_path: str, step: int) -> StepResult:
        """See `TrainerRank.train_step`."""
        limit_s = self._config.trainer.step_timeout_s
        paths = await self._deliver(limit_s, batch_path) if self._holders else {}
        result: StepResult = await self._gather(
            limit_s,
            "train_step",
            [
                actor.call.remote("train_step", paths.get(node, batch_path), step)
                for actor, node in zip(self._actors, self._nodes, strict=True)
            ],
        )
        return result

    async def _deliver(self, limit_s: float, batch_path: str) -> dict[str, str]:
        """Bring a batch to the other nodes, once to each; its path by node.

        Ray's store gets it once, and sends it to a node when its holder asks; the object goes with this call.
        """
        frame = await asyncio.to_thread(lambda: ray.put(np.fromfile(batch_path, np.uint8)))
        answers = await self._answers(
            limit_s,
            "the arrival of a batch",
            {rank: self._actors[rank].hold.remote(frame) for rank in self._holders.values()},
        )
        return dict(zip(self._holders, answers, strict=True))

    async def take_snapshot(self, weight_version: int) -> None:
        """See `TrainerRank.take_snapshot`."""
        await self._all(self._config.weights.timeout_s, "take_snapshot", weight_version)

    async def publish(self, directory: str, weight_version: int) -> None:
        """See `TrainerRank.publish`."""
        await self._beside(self._config.weights.timeout_s, "publish", directory, weight_version)

    async def publish_delta(self, path: str, base: int | None, weight_version: int) -> bool:
        """See `TrainerRank.publish_delta`."""
        written: bool = await self._beside(
            self._config.weights.timeout_s, "publish_delta", path, base, weight_version
        )
        return written

    async def open_weight_group(self, invite: GroupInvite) -> None:
        """See `TrainerRank.open_weight_group`."""
        await self._beside(self._config.weights.timeout_s, "open_weight_group", invite)

    async def close_weight_group(self, group_name: str) -> None:
        """See `TrainerRank.close_weight_group`."""
        await self._beside(self._config.weights.timeout_s, "close_weight_group", group_name)

    async def plan_buckets(self, bucket_bytes: int) -> tuple[tuple[TensorSpec, ...], ...]:
        """See `TrainerRank.plan_buckets`."""
        plan: tuple[tuple[TensorSpec, ...], ...] = await self._beside(
            self._config.weights.timeout_s, "plan_buckets", bucket_bytes
        )
        return plan

    async def send_weights(self, group_names: list[str], bucket_bytes: int) -> None:
        """See `TrainerRank.send_weights`."""
        # The ranks bound each broadcast themselves and leave dead engines out; this is for a dead trainer.
        await self._beside(2 * self._config.weights.timeout_s, "send_weights", group_names, bucket_bytes)

    async def checksums(self) -> dict[str, str]:
        """See `TrainerRank.checksums`."""
        sums: dict[str, str] = await self._beside(self._config.weights.timeout_s, "checksums")
        return sums

    async def share_bucket(self, number: int, bucket_bytes: int, copies: int) -> list[bytes]:
        """See `TrainerRank.share_bucket`."""
        payloads: list[bytes] = await self._beside(
            self._config.weights.timeout_s, "share_bucket", number, bucket_bytes, copies
        )
        return payloads

    async def offload(self) -> None:
        """See `TrainerRank.offload`."""
        await self._all(self._config.weights.timeout_s, "offload")

    async def reload(self) -> None:
        """See `TrainerRank.reload`."""
        await self._all(self._config.weights.timeout_s, "reload")

    async def save_checkpoint(self, directory: str, extra: dict[str, Any]) -> None:
        """See `TrainerRank.save_checkpoint`."""
        await self._all(self._config.trainer.step_timeout_s, "save_checkpoint", directory, extra)

    async def saved_checkpoint(self, wait: bool) -> Saved:
        """See `TrainerRank.saved_checkpoint`."""
        saved: Saved = await self._all(self._config.trainer.step_timeout_s, "saved_checkpoint", wait)
        return saved

    async def close(self) -> None:
        """Stop all ranks."""
        await self._all(self._config.weights.timeout_s, "close")

    async def _all(self, limit_s: float, method: str, *arguments: Any) -> Any:
        return await self._gather(
            limit_s, method, [actor.call.remote(method, *arguments) for actor in self._actors]
        )

    async def _beside(self, limit_s: float, method: str, *arguments: Any) -> Any:
        """`_all`; with `weights.overlap` by rank 0 alone, which has the copy, beside a step."""
        if not self._config.weights.overlap:
            return await self._all(limit_s, method, *arguments)
        call = self._actors[0].call.options(concurrency_group=WEIGHTS)
        return await self._gather(limit_s, method, [call.remote(method, *arguments)])

    async def _gather(self, limit_s: float, method: str, references: list[Any]) -> Any:
        """Wait for all ranks; rank 0's answer. The first rank that fails fails the call."""
        return (await self._answers(limit_s, method, dict(enumerate(references))))[0]

    async def _answers(self, limit_s: float, method: str, references: dict[int, Any]) -> list[Any]:
        """Wait for some ranks; their answers. The first rank that fails fails the call."""

        async def answer(rank: int, reference: Any) -> Any:
            try:
                return await reference
            except RayActorError as error:
                raise TrainerError(
                    f"trainer rank {rank} died during {method}; its last words are in {self._log_paths[rank]}"
                ) from error
            except RayTaskError as error:
                failure = TrainerError(
                    f"trainer rank {rank} failed in {method}: {last_line(error)}; see {self._log_paths[rank]}"
                )
                raise cause_of(error, failure) from error

        try:
            async with asyncio.timeout(limit_s):
                async with Nursery() as ranks:
                    answers = [
                        ranks.start_task(f"trainer rank {rank}", answer(rank, reference))
                        for rank, reference in references.items()
                    ]
        except TimeoutError as error:
            raise TrainerError(
                f"the trainer took more than {limit_s} s for {method}; see {self._log_paths[0]}"
            ) from error
        return [task.result() for task in answers]


async def made(actor: Any, *arguments: Any) -> None:
    """Let a rank's actor make its worker.

    Raises:
        AsyncRLError: Of the worker, or `EnvironmentNotReady`.
    """
    try:
        await actor.make.remote(*arguments)
    except RayTaskError as error:
        failure = EnvironmentNotReady(f"a trainer rank could not be made: {last_line(error)}")
        raise cause_of(error, failure) from error


def cause_of(error: Exception, otherwise: AsyncRLError) -> AsyncRLError:
    """Our own error as it was raised in the actor, or one that says what happened there."""
    ours = isinstance(error, RayTaskError) and isinstance(error.cause, AsyncRLError)
    return error.cause if ours else otherwise  # type: ignore[attr-defined]


def last_line(error: Exception) -> str:
    """What Ray's long messages come to."""
    return str(error).strip().splitlines()[-1]
