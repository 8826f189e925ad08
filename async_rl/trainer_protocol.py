"""What the orchestrator requires of a trainer, and what each of its ranks must offer.

`async_rl` uses the trainer only through these two protocols. The config names the class that implements
`TrainerRank` (`trainer.worker`), which is in the `trainer` package. `async_rl.placement` makes a `Trainer` of
ranks.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from async_rl.engine_protocol import GroupInvite, TensorSpec


class Extreme(msgspec.Struct, frozen=True, kw_only=True):
    """A trained token with a large difference between the log-probs of trainer and engine before the step."""

    trajectory_id: str
    position: int
    """The position of the token in its trajectory, from 0, including the prompt."""
    token_id: int
    lag: int
    """The number of versions between the weights that sampled it and the trainer's."""
    rollout_log_prob: float
    """The engine's log-prob, nats."""
    log_prob: float
    """The trainer's log-prob, nats."""

    @property
    def difference(self) -> float:
        """Trainer minus rollout, nats."""
        return self.log_prob - self.rollout_log_prob


class TrainerState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a trainer after it was set up or resumed."""

    step: int
    """The number of steps done; the weight version equals it."""
    extra: dict[str, Any] = {}
    """The argument of `save_checkpoint`: the data position."""
    skipped_checkpoints: tuple[str, ...] = ()
    """What is wrong with newer checkpoints than the one that it was resumed from."""


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """The status of the last checkpoint."""

    step: int | None = None
    """The step of the newest checkpoint that this trainer has written completely."""
    writing: bool = False
    """Whether the last checkpoint is still being written."""
    failure: str | None = None
    """Why the last checkpoint could not be written."""
    pause_s: float = 0.0
    """The seconds that training paused for it."""
    write_s: float = 0.0
    """The seconds of writing it beside the training."""
    num_bytes: int = 0
    """The bytes that one rank wrote of it."""


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one trainer step, reduced over all ranks."""

    step: int
    metrics: dict[str, float]
    """The figures by name: the fields of `observability.records.StepRecord` that a trainer measures. `loss`,
    `grad_norm` and `step_s` are always present."""
    extremes: tuple[Extreme, ...] = ()
    """The tokens with the largest differences, for `StepRecord.extremes`."""


class TrainerRank(Protocol):
    """One process of the trainer. All methods are called on all ranks, in the same order, and block.

    With `weights.overlap`, the methods that send weights (`publish`, `publish_delta`, `send_weights`,
    `share_bucket`, `plan_buckets`, the groups) are called on rank 0 alone, by a second thread while the first
    one trains: after `take_snapshot` they read only the copy and do not communicate with other ranks.
    """

    def __init__(self, config: dict[str, Any], rank: int, world_size: int, init_address: str) -> None:
        """Take the whole run config as plain values; build nothing yet."""
        ...

    def setup(self, checkpoint_dir: str | None) -> TrainerState:
        """Build the model, load the checkpoint (or the model's own weights) and start on all ranks."""
        ...

    def train_step(self, batch_path: str, step: int) -> StepResult:
        """Train on the `TrainBatch` frame at a path; every rank returns, rank 0's result is reported."""
        ...

    def take_snapshot(self, weight_version: int) -> None:
        """Copy the current weights: until the next call, this copy is published and sent."""
        ...

    def publish(self, directory: str, weight_version: int) -> None:
        """Write the current weights as safetensors in Hugging Face names, atomically."""
        ...

    def publish_delta(self, path: str, base: int | None, weight_version: int) -> bool:
        """Keep a copy of the current weights on rank 0, and write their difference to the copy before.

        Args:
            path: The path of the file, which appears when it is complete.
            base: The version that the difference is relative to; None to write nothing.
            weight_version: The version of the current weights.

        Returns:
            On rank 0, whether there is a file: the copy before was of `base`.
        """
        ...

    def open_weight_group(self, invite: GroupInvite) -> None:
        """Join a weight-update group as its rank 0, on rank 0; other ranks return at once."""
        ...

    def close_weight_group(self, group_name: str) -> None:
        """Leave a weight-update group."""
        ...

    def plan_buckets(self, bucket_bytes: int) -> tuple[tuple[TensorSpec, ...], ...]:
        """Return names, dtypes and shapes of all tensors in the order in which `send_weights` broadcasts
        them.
        """
        ...

    def send_weights(self, group_names: list[str], bucket_bytes: int) -> None:
        """Broadcast the current weights, bucket by bucket, into each of the groups."""
        ...

    def checksums(self) -> dict[str, str]:
        """Return sums over the current weights, under an engine's names, computed as an engine does.

        Returns:
            On rank 0, for engines on a CPU; else nothing.
        """
        ...

    def share_bucket(self, number: int, bucket_bytes: int, copies: int) -> list[bytes]:
        """Write one bucket of the current weights to memory that processes of rank 0's host can read.

        Numbers are requested in order; 0 starts anew, at any time. A bucket stays valid while the next one
        is requested.

        Args:
            number: The index of the bucket in `plan_buckets`.
            bucket_bytes: The argument of `plan_buckets`.
            copies: The number of readers: each needs its own payload.

        Returns:
            `copies` payloads on rank 0, none on the others.
        """
        ...

    def offload(self) -> None:
        """Move all device memory that training needs to the host; only `reload` and `close` follow.

        A repeated call has no effect.
        """
        ...

    def reload(self) -> None:
        """Move the memory back to the device, unchanged. A repeated call has no effect."""
        ...

    def save_checkpoint(self, directory: str, extra: dict[str, Any]) -> None:
        """Copy model, optimizer, step and `extra`; write them beside the training, after the checkpoint
        before.
        """
        ...

    def saved_checkpoint(self, wait: bool) -> Saved:
        """Return the status of the last checkpoint; `wait` until it is complete or has failed."""
        ...

    def close(self) -> None:
        """Leave the process group."""
        ...


class Trainer(Protocol):
    """All ranks together, asynchronously.

    The orchestrator makes one call at a time, and with `weights.overlap` one more of those that send weights.
    """

    async def setup(self, checkpoint_dir: str | None) -> TrainerState:
        """Call `TrainerRank.setup` on all ranks."""
        ...

    async def train_step(self, batch_path: str, step: int) -> StepResult:
        """Call `TrainerRank.train_step` on all ranks."""
        ...

    async def take_snapshot(self, weight_version: int) -> None:
        """Call `TrainerRank.take_snapshot` on all ranks."""
        ...

    async def publish(self, directory: str, weight_version: int) -> None:
        """Call `TrainerRank.publish` on all ranks."""
        ...

    async def publish_delta(self, path: str, base: int | None, weight_version: int) -> bool:
        """Call `TrainerRank.publish_delta` on all ranks."""
        ...

    async def open_weight_group(self, invite: GroupInvite) -> None:
        """Call `TrainerRank.open_weight_group` on all ranks."""
        ...

    async def close_weight_group(self, group_name: str) -> None:
        """Call `TrainerRank.close_weight_group` on all ranks."""
        ...

    async def plan_buckets(self, bucket_bytes: int) -> tuple[tuple[TensorSpec, ...], ...]:
        """Call `TrainerRank.plan_buckets` on all ranks."""
        ...

    async def send_weights(self, group_names: list[str], bucket_bytes: int) -> None:
        """Call `TrainerRank.send_weights` on all ranks."""
        ...

    async def checksums(self) -> dict[str, str]:
        """Call `TrainerRank.checksums` on all ranks."""
        ...

    async def share_bucket(self, number: int, bucket_bytes: int, copies: int) -> list[bytes]:
        """Call `TrainerRank.share_bucket` on all ranks."""
        ...

    async def offload(self) -> None:
        """Call `TrainerRank.offload` on all ranks."""
        ...

    async def reload(self) -> None:
        """Call `TrainerRank.reload` on all ranks."""
        ...

    async def save_checkpoint(self, directory: str, extra: dict[str, Any]) -> None:
        """Call `TrainerRank.save_checkpoint` on all ranks."""
        ...

    async def saved_checkpoint(self, wait: bool) -> Saved:
        """Call `TrainerRank.saved_checkpoint` on all ranks."""
        ...

    async def close(self) -> None:
        """Stop all ranks."""
        ...
