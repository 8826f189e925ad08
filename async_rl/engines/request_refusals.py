"""Whether an engine that refuses requests as wrong (400) is wrong itself.

An engine is believed when it says that a request is wrong: any other would refuse it too. An engine that
refuses the requests of one trajectory after the other, while others accept theirs, is broken. Until another
can show that, its refusals are doubted: `EnginePool.doubts_refusals`.
"""

from __future__ import annotations

from typing import Final

from async_rl.types import root_of

MIN_TRAJECTORIES: Final = 3
"""Trajectories that an engine may refuse in a row: fewer can really have made a wrong request each."""


class RequestRefusals:
    """The requests that one engine has refused as wrong since it last accepted one. Owns no clock.

    Example:
        >>> refusals = RequestRefusals()
        >>> for key in ("t0", "t0.1", "t1", "t2"):
        ...     refusals.record_refusal(key, now=10.0)
        >>> refusals.num_trajectories, refusals.are_suspicious
        (3, True)
    """

    def __init__(self) -> None:
        """Start without refusals."""
        self.accepted_s = float("-inf")
        """When the engine last accepted a request."""
        self._trajectories: set[str] = set()
        self.since_s = 0.0
        """When it refused the first of them."""

    @property
    def num_trajectories(self) -> int:
        """Return the number of trajectories whose requests it has refused since it last accepted one."""
        return len(self._trajectories)

    def record_refusal(self, trajectory_id: str, now: float) -> None:
        """Record that it refused a request; branches count as their trajectory."""
        if not self._trajectories:
            self.since_s = now
        self._trajectories.add(root_of(trajectory_id))

    def record_accepted_request(self, now: float) -> None:
        """Record that it sent the first token of a call."""
        self.accepted_s = now
        self._trajectories.clear()

    @property
    def are_suspicious(self) -> bool:
        """Whether the engine may be to blame: another that has accepted a request `since_s` proves it."""
        return self.num_trajectories >= MIN_TRAJECTORIES
