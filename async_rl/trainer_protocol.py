"""The protocol of a trainer, which is all that `async_rl` knows of it.

The class of its ranks is named in the config (`trainer.worker`) and is part of the `trainer` package.
`async_rl.placement` turns ranks into a `Trainer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from async_rl.codec import UNREADABLE
from async_rl.engine_protocol import GroupInvite, WeightBucket
from async_rl.errors import CheckpointError
from async_rl.types import TakenBatch


class Extreme(msgspec.Struct, frozen=True, kw_only=True):
    """One of the trained tokens on which trainer and engine disagree most, before the step."""

    trajectory_id: str
    position: int
    """Position of the token in its trajectory, from 0, including the prompt."""
    token_id: int
    lag: int | None
    """Versions between the weights that sampled the token and the trainer's; None where those are not
    known, `TokenSpan.lag_unknown`."""
    rollout_log_prob: float
    """The engine's log-prob, nats."""
    log_prob: float
    """The trainer's log-prob, nats."""

    @property
    def difference(self) -> float:
        """Trainer minus rollout log-prob, nats."""
        return self.log_prob - self.rollout_log_prob


class TrainerState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a trainer after set-up or resume."""

    step: int
    """Number of completed steps; the weight version equals it."""
    extra: dict[str, Any] = {}
    """The `extra` argument of `save_checkpoint`: the data position."""
    skipped_checkpoints: tuple[str, ...] = ()
    """The defect of each newer checkpoint that was skipped."""


class BestCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """What `trainer.keep_best` keeps: `best.json` in the folder of checkpoints.

    The driver writes it, and the trainer reads it before it removes checkpoints.
    """

    metric: str
    step: int | None = None
    """The checkpoint with the best evaluation; None if no version with a checkpoint was evaluated."""
    value: float | None = None
    """The value of the metric."""
    evaluating: int | None = None
    """The version that is being evaluated, which may become the best."""

    @property
    def kept(self) -> set[int]:
        """Steps whose checkpoints must not be removed."""
        return {step for step in (self.step, self.evaluating) if step is not None}


BEST_FILE: Final = "best.json"


def read_best(directory: Path) -> BestCheckpoint | None:
    """Return what a folder of checkpoints says about its best one; None if it says nothing.

    Raises:
        CheckpointError: It cannot be read.
    """
    try:
        return msgspec.json.decode((directory / BEST_FILE).read_bytes(), type=BestCheckpoint)
    except FileNotFoundError:
        return None
    except UNREADABLE as error:
        raise CheckpointError(
            f"{directory / BEST_FILE} is damaged: {error}; remove it, and the run writes it anew"
        ) from error


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Estimated bytes of the tensors of consecutive ranks that hold equally much."""

    first: int
    last: int
    moments: dict[str, dict[str, int]]
    """What lies on the device at each moment that may be the fullest: bytes by part."""
    host: dict[str, int]
    """What lies in host memory, bytes by part."""

    @property
    def fullest(self) -> str:
        """The moment with the most bytes on the device."""
        return max(self.moments, key=lambda moment: sum(self.moments[moment].values()))

    @property
    def peak(self) -> int:
        """Bytes on the device at the fullest moment."""
        return sum(self.moments[self.fullest].values())


class TrainerMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Estimated memory of a trainer, before it is started."""

    ranks: list[RankMemory]
    model_bytes: int
    """The whole model in its type, as engines load it."""
    adapter_bytes: int = 0
    """An adapter on one rank of an engine; 0 if engines are given whole weights."""


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of the last checkpoint."""

    step: int | None = None
    """Step of the newest complete checkpoint that this trainer has written."""
    writing: bool = False
    """Whether the last checkpoint is still being written."""
    failure: str | None = None
    """Why the last checkpoint could not be written."""
    pause_s: float = 0.0
    """How long the checkpoint paused the trainer, seconds."""
    write_s: float = 0.0
    """How long writing took beside the training, seconds."""
    num_bytes: int = 0
    """Bytes that one rank wrote."""


class SendReport(msgspec.Struct, frozen=True, kw_only=True):
    """How a sender, or all of them, sent its buckets."""

    silent: dict[str, list[int]] = {}
    """By the name of a sender's group (`group_of`): the ranks whose processes were found stopped."""
    gather_s: float = 0.0
    """Time in which buckets were filled, seconds. The one before was on its way meanwhile."""
    send_s: float = 0.0
    """Time in which nothing was left to do but to wait for broadcasts, seconds."""

    @classmethod
    def of_slowest(cls, reports: Sequence[SendReport]) -> SendReport:
        """Return the report of senders that work at the same time; the times are those of the slowest."""
        slowest = max(reports, key=lambda report: report.gather_s + report.send_s)
        silent = {name: ranks for report in reports for name, ranks in report.silent.items()}
        return cls(silent=silent, gather_s=slowest.gather_s, send_s=slowest.send_s)


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one trainer step, reduced over all ranks."""

    step: int
    metrics: dict[str, float]
    """Figures by name: the fields of `StepRecord` that a trainer measures. `loss`, `grad_norm` and `step_s`
    are always present."""
    extremes: tuple[Extreme, ...] = ()
    """Largest absolute log-prob differences first."""


class LagFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over the trained tokens of one lag, by part of the batch: each part has some of its groups.

    `w = exp(trainer's log-prob - rollout log-prob)` is the importance weight of a token.
    """

    lag: int
    """The trainer's version minus the version that sampled the tokens."""
    tokens: tuple[int, ...]
    weights: tuple[float, ...]
    """Sums of w."""
    squares: tuple[float, ...]
    """Sums of w squared."""
    kl: tuple[float, ...]
    """Sums of the k3 estimate of the KL divergence of the sampling from the trainer's policy, nats."""
    with_fresh: tuple[tuple[float, ...], ...]
    """`[i][j]`: inner product of the gradients of part i of this lag and part j of the smallest lag."""
    with_itself: tuple[tuple[float, ...], ...]
    """`[i][j]`: the same of parts i and j of this lag."""
    with_exact: tuple[tuple[float, ...], ...]
    """`[i][j]`: inner product of the gradient of part i and the one that part j would have, if the importance
    weight of each token were exactly w: neither cut nor left out."""
    exact_with_itself: tuple[tuple[float, ...], ...]
    """`[i][j]`: the same of these gradients of parts i and j."""


class LagMeasurement(msgspec.Struct, frozen=True, kw_only=True):
    """What the tokens of a batch give the trainer, by their lag."""

    lags: tuple[LagFigures, ...]
    """The smallest lag, that of the freshest tokens, first."""
    unknown_tokens: int = 0
    """Trained tokens whose lag is not known, `TokenSpan.lag_unknown`."""


class Trainer(Protocol):
    """All ranks of the trainer together. The orchestrator makes one call at a time.

    The class of a rank, `trainer.worker`, has the same methods, which block. Each is called on all ranks in
    the same order, and rank 0's result is reported. A rank is constructed with the whole run config as plain
    values, its number, the number of ranks and the address at which they meet. It has one more method,
    `needed_trajectories(batch)`: it returns the indices of the trajectories whose frames the rank reads in
    `read_batch`, and is called on ranks of other nodes than the frames', which are brought there first.

    With `weights.overlap`, the methods that export weights (`publish`, `publish_delta`, `send_weights`,
    `share_bucket`, `plan_buckets`, the groups) are called on rank 0 alone, by a second thread while the first
    one trains. After `take_snapshot` they only read the copy and exchange nothing with other ranks.
    """

    async def setup(self, checkpoint_dir: str | None) -> TrainerState:
        """Build the model on all ranks and load the checkpoint, or else the model's own weights."""
        ...

    async def read_batch(self, batch: TakenBatch) -> dict[str, str]:
        """Read and verify the frames of each rank's micro-batches, for the `train_step` that may follow.

        Needs no device memory and exchanges nothing between ranks. The next call replaces what was read.

        Returns:
            What is wrong with frames that are missing or damaged, by trajectory. Nothing is kept then.

        Raises:
            NodeUnreachable: A node that has frames of the batch does not answer; nothing is kept.
        """
        ...

    async def train_step(self, batch: Any, step: int) -> StepResult:
        """Train on the batch that `read_batch` has read last: a `TakenBatch`, or what else the ranks take."""
        ...

    async def measure_lags(self, batch: TakenBatch) -> LagMeasurement:
        """Measure importance weights and gradients of a batch's tokens by their lag; no weight changes.

        Each lag's gradient is of the loss of one update of the whole batch in which other tokens do not
        count. The hosts hold copies of three gradients for each part.

        Args:
            batch: A batch whose frames are in a folder that all nodes share, such as a kept one.
        """
        ...

    async def take_snapshot(self, weight_version: int) -> None:
        """Copy the current weights; exports use this copy until the next snapshot."""
        ...

    async def publish(self, directory: str, weight_version: int) -> None:
        """Write the current weights atomically as safetensors with Hugging Face names."""
        ...

    async def publish_delta(self, path: str, base: int | None, weight_version: int) -> bool:
        """Keep a copy of the current weights on rank 0, and write its difference from the previous copy.

        Args:
            path: The file, which appears complete or not at all.
            base: The version that the difference must start from; None writes nothing.
            weight_version: Version of the current weights.

        Returns:
            Whether the file was written, that is, whether the previous copy had version `base`.
        """
        ...

    async def open_weight_group(self, invite: GroupInvite) -> None:
        """Join a weight-update group as its rank 0, on the sender; other ranks return at once."""
        ...

    async def close_weight_group(self, group_name: str) -> None:
        """Leave the weight-update group of each sender; do nothing when it is not open."""
        ...

    async def plan_buckets(self, bucket_bytes: int) -> tuple[WeightBucket, ...]:
        """Return all buckets in the order in which engines take them."""
        ...

    async def abort_weight_group(self, group_name: str) -> None:
        """Let `send_weights` send no more into a group; it may be called meanwhile."""
        ...

    async def send_weights(self, group_names: list[str], bucket_bytes: int) -> SendReport:
        """Broadcast the current weights, bucket by bucket: each sender its own, to its group of each name.

        A group that fails is left out from then on. The report is of all ranks.
        """
        ...

    async def checksums(self) -> dict[str, str]:
        """Compute checksums of the current weights by the engine's method and under its names.

        Returns:
            The checksums on rank 0, an empty dict on the others. If engines run on a GPU, they have names of
            the trainer's own, and only tell which tensors have changed.
        """
        ...

    async def share_bucket(self, number: int, bucket_bytes: int, ranks: list[int]) -> list[bytes]:
        """Put one bucket of the current weights where processes on a rank's host can read it.

        A rank of an engine reads it on the GPU that it shares with a trainer rank, if it shares one. Else it
        reads shared memory of rank 0.

        Buckets are requested in order; 0 starts again at any time. A bucket stays readable until the next one
        has been requested.

        Args:
            number: Index of the bucket in `plan_buckets`.
            bucket_bytes: The argument of `plan_buckets`.
            ranks: For each reader the rank that it reads from; each reader needs a payload of its own.

        Returns:
            A payload for each reader; a single rank returns those of its own readers.
        """
        ...

    async def offload(self, keep_weights: bool = False) -> None:
        """Move all device memory of the trainer to the host; then only `read_batch`, `reload` or `close`.

        What has been moved stays there, so a second call changes nothing.

        Args:
            keep_weights: Whether weights stay on the device, so that engines can be given them.
        """
        ...

    async def reload(self) -> None:
        """Move the memory back unchanged. A second call changes nothing."""
        ...

    async def save_checkpoint(self, directory: str, extra: dict[str, Any]) -> None:
        """Copy model, optimizer, step and `extra`; write them in the background after the previous ones."""
        ...

    async def saved_checkpoint(self, wait: bool) -> Saved:
        """Return the outcome of the last checkpoint; `wait` blocks until it is complete or has failed."""
        ...

    async def close(self) -> None:
        """Stop all ranks."""
        ...
