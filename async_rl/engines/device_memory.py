"""What an engine holds of a device, as states that have only the calls which its server survives.

```
  serving ──stop()──► Stopped ──release()──► Empty ──resume_weights()──► Loadable ──resume_rest()──► whole
                                               ▲                            │
                                               └──────────release()─────────┘
```

A server dies when it is told to give memory back while anything runs, to give back what it does not hold, or
to take what it holds: SGLang asserts. So nobody else calls `Engine.release_memory` and `resume_memory`, the
way to a state is through the one before it, and each object is good for one call: it is used up by the
attempt, not by the success. When the attempt fails or is cancelled nobody knows what the server holds, and
nobody has an object to try again with: it has to be started anew.
"""

from __future__ import annotations

from typing import Final

from async_rl.engine_protocol import Engine, MemoryPart
from async_rl.errors import InvariantError

_REST: Final[tuple[MemoryPart, ...]] = ("kv_cache", "cuda_graph")
"""All but the weights: what is of no use while new weights are loaded."""


class _Holding:
    """An engine in a known state, good for one call."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._used = False

    def _use(self) -> Engine:
        """The engine, this once.

        Raises:
            InvariantError: The second time. No request has been sent.
        """
        if self._used:
            raise InvariantError(
                f"{type(self).__name__} of {self.engine.engine_id} is used a second time: what the engine "
                "holds has changed since"
            )
        self._used = True
        return self.engine


class Stopped(_Holding):
    """It holds all of its memory, nothing runs on it and nothing is sent to it. See `stop`."""

    async def release(self) -> Empty:
        """Give all of it back."""
        engine = self._use()
        await engine.release_memory((*_REST, "weights"))
        return Empty(engine)


class Empty(_Holding):
    """It holds nothing."""

    async def resume_weights(self) -> Loadable:
        """Take the memory of its weights, with nothing of use in it."""
        engine = self._use()
        await engine.resume_memory(("weights",))
        return Loadable(engine)


class Loadable(_Holding):
    """It has room for weights, and no cache: it can be given weights, and no calls."""

    async def resume_rest(self) -> None:
        """Take the rest of its memory. With weights in it, it can serve."""
        await self._use().resume_memory(_REST)

    async def release(self) -> Empty:
        """Give the memory of the weights back."""
        engine = self._use()
        await engine.release_memory(("weights",))
        return Empty(engine)


async def stop(engine: Engine) -> Stopped:
    """End all that runs on an engine that nothing is sent to any more (`EnginePool.hold`).

    Calls end as aborts, with what they have: their sessions go on from there when it serves again.
    """
    await engine.interrupt("abort")
    return Stopped(engine)
