"""What an engine holds of a device, as states that offer only the requests which its server survives.

```
 serving ─stop_engine()─► StoppedEngine ─release_all()─► EmptyEngine ─resume_weights()─► LoadableEngine
    ▲                                                         ▲                              │  │
    │                                                         └───────release_weights()──────┘  │
    └────────────────────────────────────────────resume_rest()──────────────────────────────────┘
```

An SGLang server dies of an assertion when it is asked to release memory it does not hold, or to take memory
it holds. So only this module calls `Engine.release_memory` and `resume_memory`, each state is reached through
the one before it, and each object allows one request: the attempt uses it up, even if it fails. After a
failed or cancelled attempt it is unknown what the server holds, and no object is left to try again with: the
engine has to be restarted.

A server that only loads adapters keeps the model's weights in host memory meanwhile. Their checksums before
the release and after the resume prove that they are back: an adapter would load onto any weights.

It also dies of a call that arrives between a release and the last resume. `sglang.memory_gate`, in the
server's process, ends calls before a release and refuses them until then.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from async_rl.engine_protocol import Engine, InterruptMode, MemoryPart
from async_rl.errors import InvariantError, WeightSyncError

_REST: Final[tuple[MemoryPart, ...]] = ("kv_cache", "cuda_graph")
"""All memory but the weights; it is not needed while new weights are loaded."""

Checksums = tuple[dict[str, str], ...]
"""What `Engine.checksums` returns."""


class _EngineMemory:
    """An engine in a known memory state; allows one request."""

    def __init__(self, engine: Engine, kept: Checksums | None = None) -> None:
        """Describe an engine; `kept` are the sums of the weights that its server keeps in host memory."""
        self.engine = engine
        self._kept = kept
        self._used = False

    def _use(self) -> Engine:
        """Return the engine, once.

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


class StoppedEngine(_EngineMemory):
    """An engine that holds all of its memory, runs nothing and gets no calls. `stop_engine` creates it."""

    async def release_all(self, *, keeps_weights: bool = False) -> EmptyEngine:
        """Release all of its memory.

        Args:
            keeps_weights: Whether the server was started to keep its weights in host memory.
        """
        engine = self._use()
        kept = await engine.checksums() if keeps_weights else None
        await engine.release_memory((*_REST, "weights"))
        return EmptyEngine(engine, kept)


class EmptyEngine(_EngineMemory):
    """An engine that holds no memory."""

    async def resume_weights(self) -> LoadableEngine:
        """Take the memory of its weights; their content is undefined unless the server keeps it.

        Raises:
            WeightSyncError: The server keeps its weights, and they are not those that it had.
        """
        engine = self._use()
        await engine.resume_memory(("weights",))
        if self._kept is not None and await engine.checksums() != self._kept:
            raise WeightSyncError(
                f"{engine.engine_id} does not have the model's weights that it had before it released its "
                "memory: it has to load them again, so it is restarted"
            )
        return LoadableEngine(engine, self._kept)


class LoadableEngine(_EngineMemory):
    """An engine that has memory for weights and none for a cache: weights can be loaded, calls cannot run."""

    async def resume_rest(self) -> None:
        """Take the rest of its memory, so that it can serve with the weights it has loaded."""
        await self._use().resume_memory(_REST)

    async def release_weights(self) -> EmptyEngine:
        """Release the memory of the weights."""
        engine = self._use()
        await engine.release_memory(("weights",))
        return EmptyEngine(engine, self._kept)


async def stop_engine(engine: Engine, interrupt: Callable[[InterruptMode], Awaitable[None]]) -> StoppedEngine:
    """End all calls of an engine that gets no more (`EnginePool.hold_engine`).

    Calls end as aborts with the tokens they have: their sessions continue once it serves again.

    Args:
        engine: The engine.
        interrupt: Interrupts it, as `EnginePool.interrupt_engine` does.
    """
    await interrupt("abort")
    return StoppedEngine(engine)
