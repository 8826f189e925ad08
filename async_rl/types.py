"""The core types: one immutable type for each stage of a trajectory.

```
Task ──session──► Segment… ──outcome──► Trajectory
                                            │ encoded once, where it was made, as a frame of its node's spool
                                            ▼
   StoredTrajectory ──siblings──► Group ──B groups──► TakenBatch ──a rank's share──► TrainBatch
```

Derived values (masks, versions per token, staleness) are computed, never stored a second time. Only the maker
of an array may write to it; decoded arrays are read-only views of their frame. This module imports nothing
else of the project.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
ExpertIdArray = npt.NDArray[Any]
"""uint8 where the model has at most 256 experts, else uint16."""

_MAX_KEPT = (1 << 16) - 1

FinishReason = Literal["stop", "length", "abort", "failover"]
"""Why one engine call ended: `abort` when it was interrupted, `failover` when its engine died during it."""

StopReason = Literal["completed", "length", "max_turns", "failed", "error"]
"""Why a trajectory ended. One that `failed` has the reward 0, which no function computes; with `error`, its
outcome contains the error, and it is not trained."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One example of the dataset."""

    task_id: str
    messages: list[dict[str, Any]]
    answer: Any = None
    metadata: dict[str, Any] = {}
    agent_loop: str | None = None
    """The name of the agent loop for this example, or a dotted path (`rollout.trust_examples`); None uses
    `rollout.agent_loop`."""
    reward: str | None = None
    """The name of the reward for this example, or a dotted path (`rollout.trust_examples`); None uses that of
    its data source, or `rollout.reward`."""
    data_source: str = ""
    """The collection that the example is from, where it names one."""
    tools: list[dict[str, Any]] = []
    """JSON schemas of the available tools, where the example brings its own."""


class Context(msgspec.Struct, frozen=True, kw_only=True, eq=False, tag="context"):
    """Tokens that the policy read but did not write: the prompt, tool results."""

    token_ids: np.ndarray  # [n] int32


class SamplingMask(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The tokens that truncated sampling (`top_k`, `top_p`, `min_p`) kept at each of n positions, ragged.

    Example:
        >>> mask = SamplingMask.of([[5, 9], []])  # 5 and 9 could be sampled; then any token
        >>> mask[:1].token_ids.tolist()
        [5, 9]
    """

    counts: np.ndarray  # [n] uint16, 0 where every token of the vocabulary could be sampled
    token_ids: np.ndarray  # [sum(counts)] uint16, or uint32 where an id does not fit

    @classmethod
    def of(cls, kept: Sequence[list[int]], limit: int = 1 << 32) -> SamplingMask:
        """Return the mask of these ids, one list for each position.

        Raises:
            ValueError: A position has too many ids, or an id is negative or not below the limit.
        """
        counts = [len(ids) for ids in kept]
        if max(counts, default=0) > _MAX_KEPT:
            raise ValueError(
                f"a sampling mask has {max(counts)} token ids at a position, expected at most {_MAX_KEPT}"
            )
        flat = array("I")
        try:
            for ids in kept:
                flat.fromlist(ids)  # numpy takes four times as long for lists
        except OverflowError as error:
            raise ValueError(
                "a sampling mask has token ids that are negative or wider than 32 bits"
            ) from error
        token_ids: np.ndarray = np.frombuffer(flat, np.uint32)
        largest = token_ids.max(initial=0)
        if largest >= limit:
            raise ValueError(f"a sampling mask has the token id {largest}, expected less than {limit}")
        if largest <= _MAX_KEPT:
            token_ids = token_ids.astype(np.uint16)
        return cls(counts=np.array(counts, np.uint16), token_ids=token_ids)

    @classmethod
    def untruncated(cls, length: int) -> SamplingMask:
        """Return the mask of positions at which every token could be sampled."""
        return cls(counts=np.zeros(length, np.uint16), token_ids=np.zeros(0, np.uint16))

    @classmethod
    def joined(cls, masks: Sequence[SamplingMask]) -> SamplingMask:
        """Return the masks one after the other; the ids get the widest type among them."""
        if not masks:
            return cls.untruncated(0)
        if len(masks) == 1:
            return masks[0]
        return cls(
            counts=np.concatenate([mask.counts for mask in masks]),
            token_ids=np.concatenate([mask.token_ids for mask in masks]),
        )

    def __len__(self) -> int:
        """Return the number of positions, n."""
        return len(self.counts)

    def __getitem__(self, positions: slice) -> SamplingMask:
        """Return the mask of consecutive positions, as views where possible."""
        start, stop, _ = positions.indices(len(self.counts))
        first = int(self.counts[:start].sum(dtype=np.int64))
        last = first + int(self.counts[start:stop].sum(dtype=np.int64))
        return SamplingMask(counts=self.counts[start:stop], token_ids=self.token_ids[first:last])

    def take(self, positions: np.ndarray) -> SamplingMask:
        """Return the mask of any positions, `[m]`, in their order."""
        ends = np.cumsum(self.counts, dtype=np.int64)
        counts = self.counts[positions].astype(np.int64)
        moved = (ends - self.counts)[positions] - (np.cumsum(counts) - counts)
        index = np.repeat(moved, counts) + np.arange(int(counts.sum()))
        return SamplingMask(counts=counts.astype(np.uint16), token_ids=self.token_ids[index])

    @property
    def rows(self) -> Int64Array:
        """The position of each id, `[sum(counts)]`."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    def keeps(self, token_ids: np.ndarray) -> BoolArray:
        """Return whether each position keeps a token, `[n]`; where every token is kept, it does."""
        found: BoolArray = self.counts == 0
        if len(self) == 1:  # most events have one token
            found |= (self.token_ids == token_ids[0]).any()
            return found
        hits = np.flatnonzero(self.token_ids == np.repeat(token_ids, self.counts))
        found[np.searchsorted(np.cumsum(self.counts, dtype=np.int64), hits, side="right")] = True
        return found


class SamplingSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The settings that the distribution of a sampled token depends on, beside the weights."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0


class Sampled(msgspec.Struct, frozen=True, kw_only=True, eq=False, tag="sampled"):
    """Tokens of one engine call under one weight version."""

    token_ids: np.ndarray  # [n] int32
    rollout_log_probs: np.ndarray  # [n] float32, nats, of the policy that sampled them
    weight_version: int
    engine_id: str
    finish_reason: FinishReason
    lag_unknown: bool = False
    """Whether `weight_version` is only the oldest version that can have sampled it, so that the bound on
    staleness holds: a restart has undone the weights, or the engine may have changed them during the call and
    has not reported which of them sampled what."""
    mask: SamplingMask | None = None
    """The tokens that truncated sampling kept at each of its n positions; None where sampling was not
    truncated. `rollout_log_probs` are those of the truncated distribution."""
    sampling: SamplingSettings | None = None
    """How they were sampled, even if other settings are used later; None where it was not recorded."""


Segment = Context | Sampled


def cap_versions(segments: Iterable[Segment], newest: int) -> tuple[Segment, ...]:
    """Lower the labels of segments to `newest`: a restart has undone the weight versions above it."""
    return tuple(
        msgspec.structs.replace(segment, weight_version=newest, lag_unknown=True)
        if isinstance(segment, Sampled) and segment.weight_version > newest
        else segment
        for segment in segments
    )


class VersionSpan(msgspec.Struct, frozen=True, kw_only=True):
    """A half-open range of positions and the weight version that computed them."""

    start: int
    end: int
    weight_version: int


NEVER_COMPUTED = -1
"""The weight version of spans of routing rows that no engine reported."""


class RoutingTrace(msgspec.Struct, frozen=True, kw_only=True, eq=False, dict=True):
    """The experts that each fed token was sent to: row i belongs to the forward pass that was fed token i.

    `spans` partition `[0, len(rows))` and say which weights computed each row. Rows that were never reported
    are in spans of the version `NEVER_COMPUTED`; their content is undefined, never a guess. The operations
    are in `async_rl.routing`.
    """

    rows: np.ndarray  # [T-1, L_moe, K] uint8 (E <= 256) or uint16, C-contiguous
    spans: tuple[VersionSpan, ...]
    num_experts: int
    moe_layers: tuple[int, ...] = ()
    """The layers of the model that the L_moe rows belong to, counted from 0."""
    prefix_hash: int = 0
    """`routing.hash_tokens` of what was fed, `token_ids[:T-1]`: rows of another text are invalid. 0 where the
    text is not known: straight from an engine."""
    recomputed: tuple[tuple[int, int], ...] = ()
    """Half-open ranges of rows that a recovery, or an engine that had retracted the call, computed anew: by
    another forward pass than the one that sampled, or under other weights."""

    def num_missing(self, end: int) -> int:
        """Return how many rows before a position were never reported."""
        return sum(
            min(span.end, end) - span.start
            for span in self.spans
            if span.weight_version == NEVER_COMPUTED and span.start < end
        )

    @cached_property
    def valid(self) -> BoolArray:
        """Which rows were reported, `[T-1] bool`, read-only."""
        valid = np.ones(len(self.rows), np.bool_)
        for span in self.spans:
            if span.weight_version == NEVER_COMPUTED:
                valid[span.start : span.end] = False
        valid.flags.writeable = False
        return valid


def root_of(trajectory_id: str) -> str:
    """Return the trajectory that the agent loop received: for a branch its trunk, else the id itself."""
    return trajectory_id.partition(".")[0]


class TurnRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of the policy. Its weight versions are those of its tokens."""

    start: int
    """The position of its first token in the trajectory; the range is half-open."""
    end: int
    finish_reason: Literal["stop", "length"]
    num_interruptions: int = 0
    """The number of its engine calls that a weight update or a failure interrupted."""
    engine_s: float = 0.0
    """The seconds spent in engine calls, including their queues, since the last restart of the driver."""
    first_token_s: float = 0.0
    """The part of `engine_s` before the first token of each call."""
    prefilled_tokens: int = 0
    """The tokens that engines prefilled for these calls: what they had not cached."""
    began_s: float | None = None
    """When it began, in seconds after the attempt; None in records of an earlier version."""
    duration_s: float = 0.0
    """The seconds until its last token, including waits for an engine that serves."""
    metadata: dict[str, Any] = {}
    """What the agent loop noted about it with `Session.annotate`, as JSON."""
    reward: float = 0.0
    """The sum of what the agent loop gave it with `Session.reward_turn`."""


class TurnReward(msgspec.Struct, frozen=True, kw_only=True):
    """The reward of one turn, which the reward of its trajectory includes."""

    end: int
    """The position in the trajectory after the turn's last token."""
    reward: float


def turn_rewards_of(records: Iterable[TurnRecord]) -> tuple[TurnReward, ...]:
    """Return the rewards of the turns that have one."""
    return tuple(TurnReward(end=each.end, reward=each.reward) for each in records if each.reward)


def with_turn_rewards(parts: dict[str, float], turn_rewards: Sequence[TurnReward]) -> dict[str, float]:
    """Return the parts of a trajectory's reward with those of its turns, if it has a reward and they do."""
    if not parts or not turn_rewards:
        return parts
    total, own = sum(each.reward for each in turn_rewards), parts["reward"]
    return parts | {"turn_rewards": total, "reward_function": own, "reward": own + total}


def without_turn_rewards(parts: dict[str, float]) -> dict[str, float]:
    """Return the parts that the reward function gave: what `with_turn_rewards` was given."""
    if "turn_rewards" not in parts or "reward_function" not in parts:
        return parts
    added = ("turn_rewards", "reward_function")
    return {name: value for name, value in parts.items() if name not in added} | {
        "reward": parts["reward_function"]
    }


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a trajectory."""

    stop_reason: StopReason
    reward: float | None = None
    reward_parts: dict[str, float] = {}
    error: str | None = None
    num_turns: int = 0
    num_tool_calls: int = 0
    num_tool_errors: int = 0
    num_interruptions: int = 0
    """The number of engine calls that a weight update interrupted while tokens were being sampled or about to
    be."""
    num_resumes: int = 0
    """The number of engine calls that continued an interrupted turn."""
    num_failovers: int = 0
    started_s: float = 0.0
    finished_s: float = 0.0


class Completion(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The argument of a reward function: the finished conversation as text."""

    messages: list[dict[str, Any]]
    """The whole conversation, beginning with the task's own messages."""
    text: str
    """The last assistant message, without special tokens."""
    stop_reason: StopReason
    is_in_thought: bool = False
    """Whether the chat template had opened a thought, `<think>`, before the last assistant message."""
    num_tool_calls: int = 0
    num_tool_errors: int = 0
    reported: dict[str, float] = {}
    """What the agent loop reported of the outcome (`Session.report`)."""
    token_ids: np.ndarray = msgspec.field(default_factory=lambda: np.empty(0, np.int32))
    """The prompt and all turns, `[T] int32`."""
    response_mask: np.ndarray = msgspec.field(default_factory=lambda: np.empty(0, np.bool_))
    """True where the policy wrote the token, `[T] bool`."""


class StoredCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """A reference to a completion in the run's folder, which is there until its group has been scored."""

    path: str
    nbytes: int
    """The size of the file."""
    checksum: int
    """As that of a `StoredTrajectory`."""

    @property
    def node(self) -> str:
        """The run's folder, which all nodes see."""
        return ""


class Trajectory(msgspec.Struct, frozen=True, kw_only=True, eq=False, dict=True, tag="trajectory"):
    """One finished attempt at a task: the tokens in order, who wrote them, and how it ended."""

    trajectory_id: str
    group_id: str
    task_id: str
    segments: tuple[Segment, ...]
    trace: RoutingTrace | None
    outcome: Outcome
    turns: tuple[TurnRecord, ...] = ()
    """The turns of the policy, in order."""
    num_inherited: int = 0
    """The number of leading segments that belong to the trajectory that this one is a branch of: they are
    context here and trained there."""
    teacher_log_probs: np.ndarray | None = None
    """`[T] float32`, nats, the teacher's log-prob of each own sampled token, 0 for others; None without a
    teacher."""

    @property
    def reward(self) -> float | None:
        """Its reward, or None before it has one."""
        return self.outcome.reward

    @property
    def turn_rewards(self) -> tuple[TurnReward, ...]:
        """The rewards of its own turns that have one."""
        inherited = self.num_inherited_tokens
        return turn_rewards_of(turn for turn in self.turns if turn.start >= inherited)

    @property
    def num_tokens(self) -> int:
        """T, context and sampled together."""
        return sum(len(segment.token_ids) for segment in self.segments)

    @property
    def num_missing_rows(self) -> int:
        """The rows that a sampled token needs and no engine reported.

        No engine has read the context behind the last sampled token, and no loss needs its rows.
        """
        if self.trace is None:
            return 0
        last = max((i for i, each in enumerate(self.segments) if isinstance(each, Sampled)), default=-1)
        return self.trace.num_missing(sum(len(each.token_ids) for each in self.segments[: last + 1]) - 1)

    @property
    def sampled(self) -> Iterator[Sampled]:
        """The segments that the policy wrote for this trajectory, in order, without inherited ones."""
        own = self.segments[self.num_inherited :]
        return (segment for segment in own if isinstance(segment, Sampled))

    @property
    def num_inherited_tokens(self) -> int:
        """The number of tokens that belong to the trajectory that this one is a branch of."""
        return sum(len(segment.token_ids) for segment in self.segments[: self.num_inherited])

    @property
    def num_sampled_tokens(self) -> int:
        """The number of tokens that the policy wrote for this trajectory."""
        return sum(len(segment.token_ids) for segment in self.sampled)

    @cached_property
    def token_ids(self) -> Int32Array:
        """All tokens, `[T] int32`."""
        return np.concatenate([segment.token_ids for segment in self.segments]).astype(np.int32, copy=False)

    @cached_property
    def response_mask(self) -> BoolArray:
        """True where the policy wrote the token, for this trajectory or one it inherits from, `[T] bool`."""
        return np.concatenate(
            [np.full(len(segment.token_ids), isinstance(segment, Sampled)) for segment in self.segments]
        )

    @cached_property
    def rollout_log_probs(self) -> Float32Array:
        """Behaviour log-probs, `[T] float32` in nats; 0 where the policy did not write the token."""
        return np.concatenate(
            [
                segment.rollout_log_probs
                if isinstance(segment, Sampled)
                else np.zeros(len(segment.token_ids), np.float32)
                for segment in self.segments
            ]
        )

    @cached_property
    def weight_versions(self) -> Int32Array:
        """The version that sampled each token, `[T] int32`; -1 where the policy did not write it."""
        return np.concatenate(
            [
                np.full(
                    len(segment.token_ids),
                    segment.weight_version if isinstance(segment, Sampled) else -1,
                    np.int32,
                )
                for segment in self.segments
            ]
        )

    @cached_property
    def sampling_mask(self) -> SamplingMask | None:
        """The tokens that truncated sampling kept at each position, T; None if it truncated nothing."""
        if all(isinstance(segment, Context) or segment.mask is None for segment in self.segments):
            return None
        return SamplingMask.joined(
            [
                SamplingMask.untruncated(len(segment.token_ids))
                if isinstance(segment, Context) or segment.mask is None
                else segment.mask
                for segment in self.segments
            ]
        )


class TokenSpan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Consecutive tokens of a trajectory that have the same origin."""

    length: int
    weight_version: int = -1
    """The weights that sampled the tokens; -1 where the policy did not write them."""
    inherited: bool = False
    """Whether they belong to the trajectory that this one is a branch of, which trains them."""
    lag_unknown: bool = False
    """As `Sampled.lag_unknown`, or because a restart has undone the weights that computed the trajectory's
    routing rows."""
    sampling: SamplingSettings | None = None
    """As `Sampled.sampling`."""

    @property
    def is_sampled(self) -> bool:
        """Whether the policy wrote the tokens for this trajectory."""
        return self.weight_version >= 0 and not self.inherited


class StoredRouting(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The description of a `RoutingTrace` without its rows."""

    shape: tuple[int, int, int]
    """`[T-1, L_moe, K]`."""
    dtype: str
    num_experts: int
    moe_layers: tuple[int, ...]
    num_invalid: int
    """Rows that no engine reported."""
    num_recomputed: int
    """Rows that were computed anew after the sampling."""
    newest_version: int = NEVER_COMPUTED
    """The newest weights that computed a row."""


class StoredTrajectory(msgspec.Struct, frozen=True, kw_only=True, tag="stored", omit_defaults=True):
    """A reference to a finished trajectory in the spool of a node, with a summary of it.

    Every decision about a trajectory (group rules, staleness and its masks, batches, micro-batches,
    advantages) reads the summary only. A trainer rank maps the frame for token ids, log-probs and routing
    rows. Where frame and summary differ in versions or reward, the summary counts.
    """

    trajectory_id: str
    group_id: str
    task_id: str
    path: str
    """The path of the frame on its node."""
    nbytes: int
    """The size of the frame."""
    checksum: int
    """The crc32c of the frame's head, which contains that of its payload."""
    spans: tuple[TokenSpan, ...]
    """A partition of the T tokens, in order."""
    reward: float | None
    stop_reason: StopReason
    node: str = ""
    """The node that has the frame; empty: it is in the run's folder, which all nodes share."""
    offset: int = 0
    """Where the frame begins in its file."""
    routing: StoredRouting | None = None
    num_turns: int = 0
    num_interruptions: int = 0
    num_resumes: int = 0
    reward_parts: dict[str, float] = {}
    duration_s: float = 0.0
    """How long its attempt took, seconds."""
    turn_rewards: tuple[TurnReward, ...] = ()
    """Of its own turns that have one."""

    @classmethod
    def of(
        cls, trajectory: Trajectory, *, path: str = "", nbytes: int = 0, checksum: int = 0, node: str = ""
    ) -> StoredTrajectory:
        """Return the reference to a trajectory whose frame is at a path; without one, only its summary."""
        outcome = trajectory.outcome
        return cls(
            trajectory_id=trajectory.trajectory_id,
            group_id=trajectory.group_id,
            task_id=trajectory.task_id,
            path=path,
            nbytes=nbytes,
            checksum=checksum,
            spans=tuple(
                TokenSpan(
                    length=len(segment.token_ids),
                    weight_version=segment.weight_version if isinstance(segment, Sampled) else -1,
                    inherited=index < trajectory.num_inherited,
                    lag_unknown=isinstance(segment, Sampled) and segment.lag_unknown,
                    sampling=segment.sampling if isinstance(segment, Sampled) else None,
                )
                for index, segment in enumerate(trajectory.segments)
                if len(segment.token_ids)
            ),
            reward=outcome.reward,
            stop_reason=outcome.stop_reason,
            node=node,
            routing=_summarize_routing(trajectory),
            num_turns=outcome.num_turns,
            num_interruptions=outcome.num_interruptions,
            num_resumes=outcome.num_resumes,
            reward_parts=outcome.reward_parts,
            duration_s=outcome.finished_s - outcome.started_s,
            turn_rewards=trajectory.turn_rewards,
        )

    def with_reward(self, parts: dict[str, float]) -> StoredTrajectory:
        """Return the reference with a reward that was not known when the attempt ended."""
        parts = with_turn_rewards(parts, self.turn_rewards)
        return msgspec.structs.replace(self, reward=parts["reward"], reward_parts=parts)

    def capped(self, newest: int) -> StoredTrajectory:
        """Return the reference after `cap_versions`; itself where there is nothing to lower.

        Where undone weights have routed the trajectory, all its tokens are marked: under `routing.merge:
        replace` their rows are those of its last call, so no weights would give these tokens these log-probs.
        """
        routing = self.routing
        rerouted = routing is not None and routing.newest_version > newest
        if not rerouted and all(span.weight_version <= newest for span in self.spans):
            return self
        if routing is not None:
            lowered = min(routing.newest_version, newest)
            routing = msgspec.structs.replace(routing, newest_version=lowered)
        return msgspec.structs.replace(
            self,
            spans=tuple(
                msgspec.structs.replace(
                    span, weight_version=min(span.weight_version, newest), lag_unknown=True
                )
                if span.weight_version > (-1 if rerouted else newest)
                else span
                for span in self.spans
            ),
            routing=routing,
        )

    @property
    def num_tokens(self) -> int:
        """T, context and sampled together."""
        return sum([span.length for span in self.spans])

    @property
    def num_sampled_tokens(self) -> int:
        """The number of tokens that the policy wrote for this trajectory."""
        return sum([span.length for span in self.spans if span.is_sampled])

    def num_trained_tokens(self, masked_below: int | None = None) -> int:
        """Return the number of own sampled tokens that are trained on.

        Args:
            masked_below: Tokens of older weights are left out of the loss; None leaves out none.
        """
        return sum(
            span.length
            for span in self.spans
            if span.is_sampled and (masked_below is None or span.weight_version >= masked_below)
        )

    @property
    def oldest_weight_version(self) -> int | None:
        """The smallest version among its own sampled tokens, or None when nothing was sampled."""
        return min([span.weight_version for span in self.spans if span.is_sampled], default=None)

    @property
    def newest_weight_version(self) -> int | None:
        """The largest version among its own sampled tokens, or None when nothing was sampled."""
        return max([span.weight_version for span in self.spans if span.is_sampled], default=None)

    @property
    def weight_versions(self) -> Int32Array:
        """The version that sampled each token, `[T] int32`; -1 where the policy did not write it."""
        return np.repeat(np.array([span.weight_version for span in self.spans], np.int32), self._lengths)

    @property
    def temperatures(self) -> Float32Array:
        """The temperature that each token was sampled at, `[T] float32`; NaN where it is not recorded."""
        each = [np.nan if span.sampling is None else span.sampling.temperature for span in self.spans]
        return np.repeat(np.array(each, np.float32), self._lengths)

    @property
    def lag_unknown(self) -> BoolArray:
        """Which tokens cannot be compared at the lag that their versions give, `[T] bool`."""
        return np.repeat(np.array([span.lag_unknown for span in self.spans], np.bool_), self._lengths)

    def loss_mask(self, masked_below: int | None = None) -> BoolArray:
        """Return which tokens are trained on, `[T] bool`; `num_trained_tokens` describes the argument."""
        trained = [
            span.is_sampled and (masked_below is None or span.weight_version >= masked_below)
            for span in self.spans
        ]
        return np.repeat(np.array(trained, np.bool_), self._lengths)

    @property
    def _lengths(self) -> list[int]:
        return [span.length for span in self.spans]


def _summarize_routing(trajectory: Trajectory) -> StoredRouting | None:
    if (trace := trajectory.trace) is None:
        return None
    return StoredRouting(
        shape=trace.rows.shape,
        dtype=trace.rows.dtype.name,
        num_experts=trace.num_experts,
        moe_layers=trace.moe_layers,
        num_invalid=trajectory.num_missing_rows,
        num_recomputed=sum(end - start for start, end in trace.recomputed),
        newest_version=max((span.weight_version for span in trace.spans), default=NEVER_COMPUTED),
    )


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """The finished trajectories of one task, which are compared with each other."""

    group_id: str
    trajectories: tuple[StoredTrajectory, ...]


class TakenBatch(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A batch for the trainer: references to the trajectories of whole groups.

    Each rank plans the micro-batches of all ranks from the summaries, in the same way, and reads the frames
    of its own ones. The frames are there until the batch is settled. Tuples are per trajectory, in the order
    of the batch.
    """

    batch_id: str
    trainer_version: int
    """The weight version that the trainer holds when it consumes this batch."""
    group_ids: tuple[str, ...]
    group_index: tuple[int, ...]
    """Which group each trajectory belongs to, ascending."""
    trajectories: tuple[StoredTrajectory, ...]
    masked_below: int | None = None
    """Tokens of older weights are left out of the loss (`rollout.staleness_policy: mask_tokens`)."""
    num_experts: int = 0
    """The experts of the model whose routing is replayed; 0 when it is not."""
    moe_layers: tuple[int, ...] = ()
    """Its layers with experts, counted from 0."""
    top_k: int = 0
    kept_in: str | None = None
    """A folder into which the trainer's ranks copy the frames, for `async-rl replay-step`."""

    def __reduce__(self) -> tuple[Callable[[bytes], TakenBatch], tuple[bytes]]:
        """Pickle as msgpack, by which Ray sends it to a rank in a tenth of the time of pickled objects."""
        return _decode_taken_batch, (msgspec.msgpack.encode(self),)

    @cached_property
    def trajectory_ids(self) -> tuple[str, ...]:
        """The ids of the trajectories."""
        return tuple(each.trajectory_id for each in self.trajectories)

    @property
    def nbytes(self) -> int:
        """The bytes of all frames."""
        return sum(each.nbytes for each in self.trajectories)

    @cached_property
    def staleness(self) -> tuple[int, ...]:
        """The staleness of the oldest trained token."""
        return tuple(self.trainer_version - self._oldest_trained(each) for each in self.trajectories)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """The number of tokens."""
        return tuple(each.num_tokens for each in self.trajectories)

    @cached_property
    def sampled_lengths(self) -> tuple[int, ...]:
        """The number of tokens that the policy wrote, each counted with the one trajectory that trains it."""
        return tuple(each.num_sampled_tokens for each in self.trajectories)

    @property
    def rewards(self) -> tuple[float, ...]:
        """The rewards."""
        return tuple(each.reward or 0.0 for each in self.trajectories)

    @cached_property
    def attempt_rewards(self) -> tuple[float, ...]:
        """The reward of each attempt, the mean over its conversations."""
        attempts: dict[str, list[float]] = {}
        for each in self.trajectories:
            attempts.setdefault(root_of(each.trajectory_id), []).append(each.reward or 0.0)
        return tuple(sum(rewards) / len(rewards) for rewards in attempts.values())

    @property
    def resumes(self) -> tuple[int, ...]:
        """How many engine calls continued an interrupted turn."""
        return tuple(each.num_resumes for each in self.trajectories)

    @cached_property
    def num_tokens(self) -> int:
        """The tokens of all trajectories."""
        return sum(self.lengths)

    @property
    def num_sampled_tokens(self) -> int:
        """The tokens that the policy wrote."""
        return sum(self.sampled_lengths)

    @cached_property
    def num_masked_tokens(self) -> int:
        """Sampled tokens that are too old to be trained."""
        trained = sum(each.num_trained_tokens(self.masked_below) for each in self.trajectories)
        return self.num_sampled_tokens - trained

    @property
    def num_fed_tokens(self) -> int:
        """The routing rows that all trajectories together should have: all tokens but the last of each."""
        return self.num_tokens - len(self.trajectories)

    @property
    def routing_rows(self) -> int:
        """The routing rows of all trajectories."""
        return sum(each.routing.shape[0] for each in self.trajectories if each.routing is not None)

    @property
    def routing_rows_invalid(self) -> int:
        """Rows among them that no engine reported."""
        return sum(each.routing.num_invalid for each in self.trajectories if each.routing is not None)

    @property
    def routing_rows_recomputed(self) -> int:
        """Rows among them that a recovery computed anew."""
        return sum(each.routing.num_recomputed for each in self.trajectories if each.routing is not None)

    def _oldest_trained(self, trajectory: StoredTrajectory) -> int:
        trained = (
            span.weight_version
            for span in trajectory.spans
            if span.is_sampled and (self.masked_below is None or span.weight_version >= self.masked_below)
        )
        return min(trained, default=self.trainer_version)


def _decode_taken_batch(packed: bytes) -> TakenBatch:
    return msgspec.msgpack.decode(packed, type=TakenBatch)


class TrainBatch(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The tokens of a batch, one trajectory after the other; never padded to the longest.

    On a trainer rank, token ids and routing rows of trajectories that other ranks train are 0.

    Per-token arrays have length S, the tokens of all trajectories together; trajectory j has the range
    `[offsets[j], offsets[j+1])`. Values about *predicting* a token (mask, log-probs, versions) have the index
    of that token, so the model output at index i-1 is compared with index i. Routing rows have the index of
    the token that was fed; the last row of each trajectory does not exist and is marked invalid.
    """

    batch_id: str
    trainer_version: int
    """The weight version that the trainer holds when it consumes this batch."""
    trajectory_ids: tuple[str, ...]  # N
    group_index: np.ndarray  # [N] int32, which group each trajectory belongs to, ascending
    rewards: np.ndarray  # [N] float32
    offsets: np.ndarray  # [N + 1] int64
    token_ids: np.ndarray  # [S] int32
    loss_mask: np.ndarray  # [S] bool, the policy wrote it and it is trained on, here and nowhere else
    rollout_log_probs: np.ndarray  # [S] float32, nats, 0 where not sampled
    weight_versions: np.ndarray  # [S] int32, -1 where not sampled
    routed_experts: np.ndarray | None  # [S, L_moe, K] uint8 | uint16; None when routing is not replayed
    routing_valid: np.ndarray | None  # [S] bool
    num_experts: int = 0
    moe_layers: tuple[int, ...] = ()
    """The layers of the model that the L_moe rows belong to, counted from 0."""
    lag_unknown: np.ndarray | None = None  # [S] bool, `TokenSpan.lag_unknown`; None: of no token
    turn_reward_positions: np.ndarray = msgspec.field(default_factory=lambda: np.zeros(0, np.int64))
    """`[R] int64`, the index of the last token of each turn that has a reward of its own."""
    turn_reward_values: np.ndarray = msgspec.field(default_factory=lambda: np.zeros(0, np.float32))
    """`[R] float32`, these rewards, which `rewards` includes."""
    sampling_mask: SamplingMask | None = None
    """The tokens that could be sampled at each of the S positions; None if sampling was not truncated."""
    temperatures: np.ndarray | None = None  # [S] float32, `StoredTrajectory.temperatures`; None: all are NaN
    teacher_log_probs: np.ndarray | None = None
    """`[S] float32`, nats, the teacher's log-prob of each sampled token; 0 for other tokens, NaN where a
    trajectory was not scored; None if none was."""

    @property
    def attempt_index(self) -> Int32Array:
        """Which attempt each trajectory belongs to, `[N] int32`: a trunk and its branches are one attempt."""
        attempts: dict[str, int] = {}
        roots = (root_of(trajectory_id) for trajectory_id in self.trajectory_ids)
        return np.array([attempts.setdefault(root, len(attempts)) for root in roots], np.int32)

    @property
    def num_trajectories(self) -> int:
        """N."""
        return len(self.trajectory_ids)

    @property
    def num_tokens(self) -> int:
        """S."""
        return len(self.token_ids)
