"""Engine calls as tests make them: collected whole, or watched while they run."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import numpy as np

from async_rl.engine_protocol import Chunk, Engine, Finish, GenerateRequest, SamplingParams
from async_rl.types import RoutingTrace, SamplingMask

_numbers = itertools.count()


def request(
    prompt: Sequence[int], max_new_tokens: int, *, temperature: float = 0.0, stop: Sequence[int] = ()
) -> GenerateRequest:
    """A request that asks for routing, greedy unless told otherwise."""
    return GenerateRequest(
        request_id=f"{next(_numbers):032x}",
        input_ids=np.array(prompt, np.int32),
        max_new_tokens=max_new_tokens,
        sampling=SamplingParams(temperature=temperature, stop_token_ids=tuple(stop)),
        return_routing=True,
    )


class Call:
    """One call; `run` it, look at it meanwhile.

    Example:
        >>> call = Call(engine, request([5, 6, 7], 100))
        >>> task = group.create_task(call.run())
        >>> await call.has_tokens(3)
    """

    def __init__(self, engine: Engine, asked: GenerateRequest) -> None:
        self.engine = engine
        self.asked = asked
        self.token_ids: list[int] = []
        self.log_probs: list[float] = []
        self.masks: list[SamplingMask] = []
        self.finish: Finish | None = None
        self.started = asyncio.Event()
        """Set in the step of the loop in which the engine is called."""
        self._ended = False
        self._changed = asyncio.Condition()

    async def run(self) -> Call:
        """Take it to its end."""
        stream: Any = self.engine.generate(self.asked)
        self.started.set()
        try:
            async with aclosing(stream):
                async for event in stream:
                    async with self._changed:
                        assert self.finish is None, "an event after the finish"
                        if isinstance(event, Chunk):
                            assert len(event.token_ids) == len(event.log_probs) > 0
                            self.token_ids += event.token_ids.tolist()
                            self.log_probs += event.log_probs.tolist()
                            self.masks += [] if event.mask is None else [event.mask]
                        elif isinstance(event, Finish):
                            self.finish = event
                        self._changed.notify_all()
        finally:
            async with self._changed:
                self._ended = True
                self._changed.notify_all()
        assert self.finish is not None, "a stream without a finish"
        return self

    async def has_tokens(self, count: int) -> None:
        """Wait until so many tokens have come.

        Raises:
            AssertionError: When the call ends before.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.token_ids) >= count or self._ended)
        assert len(self.token_ids) >= count, f"the call ended after {len(self.token_ids)} tokens"

    @property
    def sequence(self) -> list[int]:
        """Prompt and answer."""
        return [*self.asked.input_ids.tolist(), *self.token_ids]

    @property
    def trace(self) -> RoutingTrace:
        """The decoded routing."""
        assert self.finish is not None
        assert self.finish.routing is not None
        return self.engine.decode_routing(self.finish.routing)

    @property
    def expert_sets(self) -> np.ndarray:
        """The routing with each row sorted: the order within a row means nothing."""
        return np.sort(self.trace.rows, axis=-1)


async def call(engine: Engine, prompt: Sequence[int], max_new_tokens: int, **sampling: Any) -> Call:
    """Make one call and wait for its end."""
    return await Call(engine, request(prompt, max_new_tokens, **sampling)).run()
