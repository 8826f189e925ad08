"""What a session needs of the engines: leases for its calls, and nothing else of the pool.

```
 Transcript ──lease(key, tokens)──► EngineCalls ──► CallLease ──generate(request)──► tokens, a finish
                                     LeaseDispatcher: in the driver, places the calls of all sessions
                                     RemoteCalls: in a rollout worker, asks the driver for each lease
```

A session runs wherever something implements this interface. It never learns how engines are updated, repaired
or lent, only that a lease has ended early.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from async_rl.engine_protocol import Chunk, Engine, Finish, GenerateRequest
from async_rl.engines.revocation import Revocation
from async_rl.errors import EngineError


class CallLease(Protocol):
    """The right to make one call on one engine, as its session sees it."""

    restart_count: int
    """How often the engine had been restarted when the lease was given."""
    epoch: int
    """How often it had begun to serve by then: ids of requests contain both."""

    @property
    def engine(self) -> Engine:
        """The engine to call."""
        ...

    @property
    def weight_version(self) -> int:
        """The version that the engine serves now; it can change during the call unless updates abort."""
        ...

    @property
    def interrupted(self) -> bool:
        """Whether the engine stopped serving after the lease was given, which explains an abort."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk | Finish, None]:
        """Stream the tokens and the end of the call, as `Engine.generate` does.

        Raises:
            EngineError: The call or its engine failed, or the call was dropped. The failure has been
                reported: the caller keeps the chunks it received and asks for another lease.
            VersionMismatch: An `EngineError` after which the caller discards the chunks: they are of unknown
                weights.
            RequestRefused: The engine refuses the request as wrong.
        """
        ...

    def record_strike(self, error: EngineError) -> None:
        """Report an implausible answer, also after the call; an engine that gives several is quarantined."""
        ...


class EngineCalls(Protocol):
    """Gives sessions leases of engines."""

    @property
    def newest_version(self) -> int:
        """The newest version that a call can have sampled under: engines serve it, or an update has begun."""
        ...

    def lease(self, key: str, tokens: int, *, prompt: int = 0) -> AbstractAsyncContextManager[CallLease]:
        """Wait for an engine and reserve capacity on it; the lease ends with the block.

        Args:
            key: Trajectory id. Calls of one trajectory prefer one engine, and the smallest key is admitted
                first.
            tokens: Tokens that the call holds on the engine at most, prompt and answer.
            prompt: Of these, tokens of the prompt.
        """
        ...

    def share_cached_prefix(self, key: str, other: str) -> None:
        """Make the trajectory `other` prefer the engine of `key`, because it begins with the same tokens."""
        ...

    def forget_trajectory(self, key: str) -> None:
        """Forget the engine of a trajectory that makes no more calls."""
        ...


class LeaseHolder(Protocol):
    """A process that makes calls of its own under leases of the pool: a rollout worker."""

    num_reports: int = 0
    """The number of its reports on its calls so far."""

    @property
    def is_silent(self) -> bool:
        """Whether it has not reported for longer than usual: its calls say nothing about their engines."""
        ...

    def begin_revocation(self, engine_id: str, *, aborts: bool) -> Sequence[Revocation]:
        """Forbid calls under the leases of an engine that it has now; those that have begun go on.

        Args:
            engine_id: The engine.
            aborts: Whether the engine then aborts those that have begun, and waits for their ends.

        Returns:
            What to wait for; nothing when it holds no lease of the engine.
        """
        ...
