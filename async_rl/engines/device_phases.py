"""Whose turn it is on devices that engines and trainer share. Where nobody shares, it is always the engines'.

```
            ┌──────────────── cut short ───────────────┐
            ▼                                          │
 engines ──► to trainer ──► trainer ──► to engines ────┴──► engines
   ▲  guests must have left   engines hold nothing     the trainer holds nothing
   └── guests: who starts engines, which then hold memory that nobody has counted; an evaluation
```

A hand-over can be cut short at any await. Whatever it had come to, `to trainer` is the way on: there each
engine is brought to hold nothing, from whatever it holds.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, Literal

from async_rl.errors import InvariantError
from async_rl.runtime.waits import waiting

Turn = Literal["engines", "to trainer", "trainer", "to engines"]

_FROM: Final[dict[Turn, frozenset[Turn]]] = {
    "engines": frozenset({"to engines"}),
    "to trainer": frozenset({"engines", "to trainer", "to engines"}),
    "trainer": frozenset({"to trainer"}),
    "to engines": frozenset({"trainer"}),
}


class DevicePhases:
    """See the module. It moves nothing: whoever hands over does, and says so here.

    Example:
        >>> turns = Turns()
        >>> turns.move("to trainer")
        >>> await turns.without_guests()
        >>> turns.move("trainer")
    """

    def __init__(self) -> None:
        """It is the engines'."""
        self.turn: Turn = "engines"
        self._engines = asyncio.Event()
        self._engines.set()
        self._over = asyncio.Event()
        self._guests = 0
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def engines_may_start(self) -> bool:
        """Whether a guest is let in."""
        return self.turn == "engines"

    def move(self, turn: Turn) -> None:
        """Go on to a turn.

        Raises:
            InvariantError: When it does not follow the one that it is.
        """
        if self.turn not in _FROM[turn] or (turn == "trainer" and self._guests):
            raise InvariantError(
                f"the turn {turn!r} does not follow {self.turn!r} with {self._guests} guests"
            )
        self.turn = turn
        if turn == "engines":
            self._engines.set()
            self._over.clear()
        else:
            self._engines.clear()
            self._over.set()

    @asynccontextmanager
    async def guest(self) -> AsyncIterator[None]:
        """The block needs engines to hold what they hold: it waits for their turn, the trainer's for it."""
        while not self.engines_may_start:
            with waiting("devices", why=lambda: f"it is the turn {self.turn!r}"):
                await self.of_engines()
        self._guests += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._guests -= 1
            if not self._guests:
                self._empty.set()

    async def of_engines(self) -> None:
        """Wait for the engines' turn."""
        await self._engines.wait()

    async def end_of_engines(self) -> None:
        """Wait until the engines' turn is over but for its guests."""
        await self._over.wait()

    async def without_guests(self) -> None:
        """Wait until no guest is left. None comes in, unless it is the engines' turn."""
        with waiting("devices", why=lambda: f"{self._guests} that start an engine, or evaluate"):
            await self._empty.wait()
