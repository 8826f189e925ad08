"""What the orchestrator asks of a trainer, and what one rank of it must offer.

`async_rl` knows the trainer only through these two protocols; the class behind `TrainerRank` is named in the
config (`trainer.worker`) and lives in the `trainer` package. `async_rl.placement` turns ranks into a
`Trainer`.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from async_rl.engine_protocol import GroupInvite, TensorSpec


class Extreme(msgspec.Struct, frozen=True, kw_only=True):
    """A trained token on which trainer and engine disagree most, before the step."""

    trajectory_id: str
    position: int
    """Of the token in its trajectory, from 0, the prompt included."""
    token_id: int
    lag: int
    """Versions between the weights that sampled it and the trainer's."""
    rollout_log_prob: float
    """The engine's, nats."""
    log_prob: float
    """The trainer's, nats."""

    @property
    def difference(self) -> float:
        """Trainer minus rollout, nats."""
        return self.log_prob - self.rollout_log_prob


class TrainerState(msgspec.Struct, frozen=True, kw_only=True):
    """Where a trainer stands after it was set up or resumed."""

    step: int
    """Steps done; the weight version equals it."""
    extra: dict[str, Any] = {}
    """What was handed to `save_checkpoint`: the data position."""
    skipped_checkpoints: tuple[str, ...] = ()
    """What is wrong with newer checkpoints than the one it was resumed from."""


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the last checkpoint."""

    step: int | None = None
    """Of the newest one that this trainer has written and that stands on the disk."""
    writing: bool = False
    """Whether the last one is still being written."""
    failure: str | None = None
    """Why the last one could not be written."""
    pause_s: float = 0.0
    """How long the trainer stood still for it."""
    write_s: float = 0.0
    """How long it was written beside the training."""
    num_bytes: int = 0
    """What one rank wrote of it."""


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """One trainer step, reduced over all ranks."""

    step: int
    metrics: dict[str, float]
    """By name: the fields of `observability.records.StepRecord` that a trainer measures. `loss` and
    `grad_norm` are always present, and so is `step_s`."""
    extremes: tuple[Extreme, ...] = ()
    """See `StepRecord.extremes`."""


class TrainerRank(Protocol):
    """One process of the trainer. All methods are called on all ranks, in the same order, and block.

    With `weights.overlap` those that give weights away (`publish`, `publish_delta`, `send_weights`,
    `share_bucket`, `plan_buckets`, the groups) are called on rank 0 alone, by a second thread while the first
    one trains: after `take_snapshot` they read nothing but the copy, and exchange nothing with other ranks.
    """

    def __init__(self, config: dict[str, Any], rank: int, world_size: int, init_address: str) -> None:
        """Take the whole run config as plain values; build nothing yet."""
        ...

    def setup(self, checkpoint_dir: str | None) -> TrainerState:
        """Build the model, load the checkpoint (or the model's own weights) and come up on all ranks."""
        ...

    def train_step(self, batch_path: str, step: int) -> StepResult:
        """Consume the `TrainBatch` frame at a path; returns on every rank, rank 0's is reported."""
        ...

    def take_snapshot(self, weight_version: int) -> None:
        """Copy the current weights: what is published and sent from now on is this copy, until the next."""
        ...

    def publish(self, directory: str, weight_version: int) -> None:
        """Write the current weights as safetensors in Hugging Face names, atomically."""
        ...

    def publish_delta(self, path: str, base: int | None, weight_version: int) -> bool:
        """Keep a copy of the current weights on rank 0, and write how they differ from the copy before.

        Args:
            path: The file; it appears whole or not at all.
            base: Version that it is to be of; None to write nothing.
            weight_version: Of the current weights.

        Returns:
            On rank 0, whether there is a file: the copy before was of `base`.
        """
        ...

    def open_weight_group(self, invite: GroupInvite) -> None:
        """Rank 0 joins a weight-update group as its rank 0; the others return at once."""
        ...

    def close_weight_group(self, group_name: str) -> None:
        """Leave it."""
        ...

    def plan_buckets(self, bucket_bytes: int) -> tuple[tuple[TensorSpec, ...], ...]:
        """Names, dtypes and shapes of all tensors in the order `send_weights` broadcasts them."""
        ...

    def send_weights(self, group_names: list[str], bucket_bytes: int) -> None:
        """Broadcast the current weights, bucket by bucket, into each of the groups."""
        ...

    def checksums(self) -> dict[str, str]:
        """Sums over the current weights, under an engine's names, as an engine makes them.

        Returns:
            On rank 0, for engines on a CPU; else nothing.
        """
        ...

    def share_bucket(self, number: int, bucket_bytes: int, copies: int) -> list[bytes]:
        """Put one bucket of the current weights where processes of rank 0's host can read it.

        Numbers are asked for in order; 0 starts anew, also in the middle. A bucket stays for as long as the
        one after it is asked for.

        Args:
            number: Index of the bucket in `plan_buckets`.
            bucket_bytes: As `plan_buckets` was told.
            copies: Who reads it: each needs a payload of its own.

        Returns:
            `copies` payloads on rank 0, none on the others.
        """
        ...

    def offload(self) -> None:
        """Move all device memory that training needs to the host; nothing but `reload` and `close` follows.

        Once more it changes nothing.
        """
        ...

    def reload(self) -> None:
        """Take it back, as it was. Once more it changes nothing."""
        ...

    def save_checkpoint(self, directory: str, extra: dict[str, Any]) -> None:
        """Copy model, optimizer, step and `extra`; write them beside the training, after the one before."""
        ...

    def saved_checkpoint(self, wait: bool) -> Saved:
        """Say what became of it, and `wait` until it stands or has failed: its folder appears when whole."""
        ...

    def close(self) -> None:
        """Leave the process group."""
        ...


class Trainer(Protocol):
    """All ranks together, asynchronously. The orchestrator makes one call at a time, and with
    `weights.overlap` one more of those that give weights away.
    """

    async def setup(self, checkpoint_dir: str | None) -> TrainerState:
        """See `TrainerRank.setup`."""
        ...

    async def train_step(self, batch_path: str, step: int) -> StepResult:
        """See `TrainerRank.train_step`."""
        ...

    async def take_snapshot(self, weight_version: int) -> None:
        """See `TrainerRank.take_snapshot`."""
        ...

    async def publish(self, directory: str, weight_version: int) -> None:
        """See `TrainerRank.publish`."""
        ...

    async def publish_delta(self, path: str, base: int | None, weight_version: int) -> bool:
        """See `TrainerRank.publish_delta`."""
        ...

    async def open_weight_group(self, invite: GroupInvite) -> None:
        """See `TrainerRank.open_weight_group`."""
        ...

    async def close_weight_group(self, group_name: str) -> None:
        """See `TrainerRank.close_weight_group`."""
        ...

    async def plan_buckets(self, bucket_bytes: int) -> tuple[tuple[TensorSpec, ...], ...]:
        """See `TrainerRank.plan_buckets`."""
        ...

    async def send_weights(self, group_names: list[str], bucket_bytes: int) -> None:
        """See `TrainerRank.send_weights`."""
        ...

    async def checksums(self) -> dict[str, str]:
        """See `TrainerRank.checksums`."""
        ...

    async def share_bucket(self, number: int, bucket_bytes: int, copies: int) -> list[bytes]:
        """See `TrainerRank.share_bucket`."""
        ...

    async def offload(self) -> None:
        """See `TrainerRank.offload`."""
        ...

    async def reload(self) -> None:
        """See `TrainerRank.reload`."""
        ...

    async def save_checkpoint(self, directory: str, extra: dict[str, Any]) -> None:
        """See `TrainerRank.save_checkpoint`."""
        ...

    async def saved_checkpoint(self, wait: bool) -> Saved:
        """See `TrainerRank.saved_checkpoint`."""
        ...

    async def close(self) -> None:
        """Stop all ranks."""
        ...
