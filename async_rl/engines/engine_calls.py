"""What a session needs of the engines: leases for its calls, and nothing else of the pool.

```
 Transcript ──lease(key, tokens)──► EngineCalls ──► Lease ──generate(request)──► tokens, a finish
                                     LeaseDispatcher: places the calls of all sessions of this process
```

A session runs wherever something implements this interface. It never learns how engines are updated, repaired
or lent, only that a lease has ended early.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Protocol

from async_rl.engines.lease import Lease


class EngineCalls(Protocol):
    """Gives sessions leases of engines."""

    @property
    def newest_version(self) -> int:
        """The newest version that a call can have sampled under: engines serve it, or an update has begun."""
        ...

    def lease(self, key: str, tokens: int, *, prompt: int = 0) -> AbstractAsyncContextManager[Lease]:
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
