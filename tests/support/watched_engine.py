"""An engine whose calls are recorded, and a chat format for answers that last until they are interrupted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from async_rl.engine_protocol import Chunk, Engine, Finish, GenerateRequest
from tests.support.sessions import PlainChat


class NeverStops(PlainChat):
    """A chat format without stop tokens, so that a sampled answer lasts until its limit."""

    stop_token_ids = ()  # type: ignore[assignment]


class WatchedEngine:
    """Records the calls of an engine, and makes them or reports their ends differently when told to."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.mute = False
        """Whether calls end without rows."""
        self.asked: list[int] = []
        """The first row that each call asked for."""
        self.ends: list[Finish] = []
        self.tokens = 0
        """Of all calls."""
        self._changed = asyncio.Condition()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk | Finish]:
        self.asked.append(request.routing_start)
        async for event in self._engine.generate(request):
            if isinstance(event, Chunk):
                async with self._changed:
                    self.tokens += len(event.token_ids)
                    self._changed.notify_all()
            elif isinstance(event, Finish):
                self.ends.append(event)
                if self.mute:
                    event = msgspec.structs.replace(event, routing=None)
            yield event

    async def has_tokens(self, count: int) -> None:
        """Wait for this many tokens; a turn that ended early raises TimeoutError."""
        async with asyncio.timeout(120), self._changed:
            await self._changed.wait_for(lambda: self.tokens >= count)
