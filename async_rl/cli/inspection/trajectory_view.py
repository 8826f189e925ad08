"""Converts a trajectory to text and figures, for people and programs; without side effects.

```
 segments  context │ sampled v3, abort │ sampled v4, stop │ context │ sampled v4, stop
 passages  prompt  │ turn 1: two calls                    │ tool    │ turn 2: one call
```
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, Final, Literal

import msgspec
import numpy as np

from async_rl.data.chat_format import ChatFormat
from async_rl.store.archive import ArchivedTrajectory, ArchiveEvent, RoutingCounts
from async_rl.types import FinishReason, Sampled, Segment, Trajectory

Decode = Callable[[Sequence[int]], str]
"""Converts token ids to text."""

Role = Literal["prompt", "policy", "tool", "user"]

_FRAME: Final = re.compile(r"<[|｜](?!tool|observation)[^<>|｜]*[|｜]>", re.IGNORECASE)
"""Special tokens that frame a message without marking it as a tool result."""

_TOOL: Final = re.compile(r"\W*(?:user\W+)?(?:tool|observation|ipython|function_response)", re.IGNORECASE)
"""How chat templates begin a tool result: Qwen's `user` around `<tool_response>`, Llama's `ipython`, …"""


class EngineCall(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one engine call under one weight version."""

    text: str
    tokens: int
    weight_version: int
    engine_id: str
    finish_reason: FinishReason
    masked: int
    """Tokens that are not trained on because they are too old."""


class LogProbs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probs of sampled tokens, nats, under the policy that sampled them."""

    mean: float
    p05: float
    min: float
    least_likely: str
    """The token of the minimum."""


class Passage(msgspec.Struct, frozen=True, kw_only=True):
    """A contiguous part of a trajectory with one author."""

    role: Role
    turn: int | None
    """Number of the turn, from 1; None for other authors than the policy."""
    text: str
    tokens: int
    token_ids: tuple[int, ...]
    trained: bool
    """Whether its tokens are trained on if the trajectory is. Tokens that a branch inherits are trained where
    they were sampled.
    """
    calls: tuple[EngineCall, ...] = ()
    rollout_log_probs: tuple[float, ...] = ()
    """The log-prob of each token under the policy that sampled it, nats; empty for other authors."""
    log_probs: LogProbs | None = None
    engine_s: float | None = None
    """Seconds in engine calls."""
    notes: dict[str, Any] = {}
    """Metadata of the turn from the agent loop (`Session.annotate`)."""


class TrajectoryView(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is shown of a trajectory."""

    trajectory_id: str
    group_id: str
    task_id: str
    reward: float | None
    reward_parts: dict[str, float]
    stop_reason: str
    error: str | None
    tokens: int
    trained_tokens: int
    """Tokens that the policy wrote and that are not too old."""
    turns: int
    tool_calls: int
    tool_errors: int
    interruptions: int
    resumes: int
    failovers: int
    weight_versions: tuple[int, ...]
    """In ascending order."""
    engines: tuple[str, ...]
    duration_s: float
    routing: RoutingCounts | None
    log_probs: LogProbs | None
    passages: tuple[Passage, ...]
    history: tuple[ArchiveEvent, ...] = ()


def decoder(chat: ChatFormat, *, special: bool = False) -> Decode:
    """Return a function from tokens to text, with or without special tokens."""

    def decode(token_ids: Sequence[int]) -> str:
        ids = [int(token_id) for token_id in token_ids]
        return str(
            chat.tokenizer.decode(ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False)
        )

    return decode


def token_numbers(token_ids: Sequence[int]) -> str:
    """Return token ids as text, for use without a tokenizer."""
    return " ".join(str(int(token_id)) for token_id in token_ids)


def view_trajectory(
    kept: ArchivedTrajectory,
    decode: Decode,
    *,
    history: Sequence[ArchiveEvent] = (),
    oldest_trained: int | None = None,
) -> TrajectoryView:
    """Build the view of a trajectory.

    Args:
        kept: The trajectory.
        decode: Converts token ids to text.
        history: Events after its end.
        oldest_trained: Tokens of older weight versions were left out of the loss; None left out none.
    """
    trajectory, outcome = kept.trajectory, kept.trajectory.outcome
    passages = _passages(trajectory, decode, oldest_trained)
    sampled = list(trajectory.sampled)
    return TrajectoryView(
        trajectory_id=trajectory.trajectory_id,
        group_id=trajectory.group_id,
        task_id=trajectory.task_id,
        reward=outcome.reward,
        reward_parts=dict(outcome.reward_parts),
        stop_reason=outcome.stop_reason,
        error=outcome.error,
        tokens=trajectory.num_tokens,
        trained_tokens=sum(p.tokens - sum(c.masked for c in p.calls) for p in passages if p.trained),
        turns=outcome.num_turns,
        tool_calls=outcome.num_tool_calls,
        tool_errors=outcome.num_tool_errors,
        interruptions=outcome.num_interruptions,
        resumes=outcome.num_resumes,
        failovers=outcome.num_failovers,
        weight_versions=tuple(sorted({segment.weight_version for segment in sampled})),
        engines=tuple(sorted({segment.engine_id for segment in sampled})),
        duration_s=outcome.finished_s - outcome.started_s,
        routing=kept.routing,
        log_probs=_log_probs(sampled, decode),
        passages=passages,
        history=tuple(history),
    )


def _passages(trajectory: Trajectory, decode: Decode, oldest: int | None) -> tuple[Passage, ...]:
    passages: list[Passage] = []
    records = {record.start: record for record in trajectory.turns}
    turn = position = 0
    inherited = trajectory.num_inherited
    marked = [(isinstance(s, Sampled), i < inherited, s) for i, s in enumerate(trajectory.segments)]
    for (is_sampled, is_inherited), run in groupby(marked, key=lambda mark: mark[:2]):
        members = [segment for *_, segment in run]
        texts = _texts(members, decode)
        token_ids = tuple(token_id for segment in members for token_id in segment.token_ids.tolist())
        tokens = len(token_ids)
        if not is_sampled:
            text = "".join(texts)
            role: Role = role_of(text) if passages else "prompt"
            passages.append(
                Passage(role=role, turn=None, text=text, tokens=tokens, token_ids=token_ids, trained=False)
            )
        else:
            turn += 1
            sampled = [segment for segment in members if isinstance(segment, Sampled)]
            record = records.get(position)
            passages.append(
                Passage(
                    role="policy",
                    turn=turn,
                    text="".join(texts),
                    tokens=tokens,
                    token_ids=token_ids,
                    trained=not is_inherited,
                    calls=tuple(_call(text, s, oldest) for text, s in zip(texts, sampled, strict=True)),
                    rollout_log_probs=tuple(
                        log_prob for segment in sampled for log_prob in segment.rollout_log_probs.tolist()
                    ),
                    log_probs=_log_probs(sampled, decode),
                    engine_s=None if record is None else record.engine_s,
                    notes={} if record is None else record.metadata,
                )
            )
        position += tokens
    return tuple(passages)


def _call(text: str, segment: Sampled, oldest: int | None) -> EngineCall:
    return EngineCall(
        text=text,
        tokens=len(segment.token_ids),
        weight_version=segment.weight_version,
        engine_id=segment.engine_id,
        finish_reason=segment.finish_reason,
        masked=len(segment.token_ids) if oldest is not None and segment.weight_version < oldest else 0,
    )


def role_of(text: str) -> Role:
    """Return who wrote the text between two turns of the policy, by how the chat template begins it."""
    return "tool" if _TOOL.match(_FRAME.sub("", text)) else "user"


def _texts(segments: Sequence[Segment], decode: Decode) -> list[str]:
    """Return the text of each segment. A character whose bytes span two segments belongs to the second."""
    texts: list[str] = []
    ids: list[int] = []
    known = ""
    for index, segment in enumerate(segments):
        ids += segment.token_ids.tolist()
        whole = decode(ids)
        if index < len(segments) - 1:
            whole = whole.rstrip("\N{REPLACEMENT CHARACTER}")
        texts.append(whole[len(known) :])
        known = whole
    return texts


def _log_probs(sampled: Sequence[Sampled], decode: Decode) -> LogProbs | None:
    values = [segment.rollout_log_probs for segment in sampled if len(segment.token_ids)]
    if not values:
        return None
    log_probs = np.concatenate(values)
    token_ids = np.concatenate([segment.token_ids for segment in sampled])
    return LogProbs(
        mean=float(log_probs.mean()),
        p05=float(np.percentile(log_probs, 5)),
        min=float(log_probs.min()),
        least_likely=decode([int(token_ids[log_probs.argmin()])]),
    )
