"""How far a trajectory is: all that admission, staleness and the status page need to know of its tokens."""

from __future__ import annotations

from typing import Protocol

import msgspec


class TrajectoryProgress(Protocol):
    """How far one trajectory is: a `JournalEntry` in its own process, a `ProgressReport` elsewhere."""

    @property
    def oldest_version(self) -> int | None:
        """The oldest weight version of its own sampled tokens, and of those that its running call may add."""
        ...

    @property
    def newest_version(self) -> int | None:
        """The newest of these versions."""
        ...

    @property
    def in_turn(self) -> bool:
        """Whether a turn of the policy is running."""
        ...

    @property
    def num_turns(self) -> int:
        """The number of turns that have ended."""
        ...

    @property
    def num_tokens(self) -> int:
        """The number of tokens of finished engine calls and of contexts, inherited ones included."""
        ...

    @property
    def num_sampled_tokens(self) -> int:
        """The number of its own sampled tokens, including those of the running call."""
        ...


class ProgressReport(msgspec.Struct, frozen=True, kw_only=True):
    """How far a trajectory was at some moment; implements `TrajectoryProgress`."""

    oldest_version: int | None = None
    newest_version: int | None = None
    in_turn: bool = False
    num_turns: int = 0
    num_tokens: int = 0
    num_sampled_tokens: int = 0

    @classmethod
    def of(cls, progress: TrajectoryProgress) -> ProgressReport:
        """Return how far a trajectory is now."""
        return cls(
            oldest_version=progress.oldest_version,
            newest_version=progress.newest_version,
            in_turn=progress.in_turn,
            num_turns=progress.num_turns,
            num_tokens=progress.num_tokens,
            num_sampled_tokens=progress.num_sampled_tokens,
        )
