"""The time-sharing phases of devices that engines and trainer share.

```
            ┌──────────────── cut short ───────────────┐
            ▼                                          │
 engines ──► to trainer ──► trainer ──► to engines ────┴──► engines
   ▲  leases must have ended  engines hold nothing    the trainer holds nothing
   └── lease holders: engine starts, whose memory is not accounted for yet; evaluations
```

A hand-over can be cut short at any await. From any phase, `to trainer` comes next: there each engine is made
to give up its memory, whatever it holds. Where devices are not shared, the phase is always `engines`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, Literal

from async_rl.errors import InvariantError
from async_rl.runtime.waits import waiting

Phase = Literal["engines", "to trainer", "trainer", "to engines"]

_PREDECESSORS: Final[dict[Phase, frozenset[Phase]]] = {
    "engines": frozenset({"to engines"}),
    "to trainer": frozenset({"engines", "to trainer", "to engines"}),
    "trainer": frozenset({"to trainer"}),
    "to engines": frozenset({"trainer"}),
}


class DevicePhases:
    """The current phase, and the lease holders that delay its end. The caller moves the memory itself."""

    def __init__(self) -> None:
        """Start in the engines' phase."""
        self.phase: Phase = "engines"
        self._engines = asyncio.Event()
        self._engines.set()
        self._over = asyncio.Event()
        self._num_holders = 0
        self._no_holders = asyncio.Event()
        self._no_holders.set()

    @property
    def engines_may_start(self) -> bool:
        """Whether `lease_engines` enters its block at once."""
        return self.phase == "engines"

    def enter_phase(self, phase: Phase) -> None:
        """Enter the next phase.

        Raises:
            InvariantError: When it does not follow the current one.
        """
        if self.phase not in _PREDECESSORS[phase] or (phase == "trainer" and self._num_holders):
            raise InvariantError(
                f"the phase {phase!r} does not follow {self.phase!r} with {self._num_holders} lease holders"
            )
        self.phase = phase
        if phase == "engines":
            self._engines.set()
            self._over.clear()
        else:
            self._engines.clear()
            self._over.set()

    @asynccontextmanager
    async def lease_engines(self) -> AsyncIterator[None]:
        """Run the block in the engines' phase, which lasts until the block ends.

        Engines keep the memory they hold, and may take more, inside the block.
        """
        while not self.engines_may_start:
            with waiting("devices", why=lambda: f"the phase is {self.phase!r}"):
                await self.wait_for_engines_phase()
        self._num_holders += 1
        self._no_holders.clear()
        try:
            yield
        finally:
            self._num_holders -= 1
            if not self._num_holders:
                self._no_holders.set()

    async def wait_for_engines_phase(self) -> None:
        """Wait until the engines' phase begins."""
        await self._engines.wait()

    async def wait_for_engines_phase_end(self) -> None:
        """Wait until the engines' phase ends; lease holders may still be left."""
        await self._over.wait()

    async def wait_for_lease_holders(self) -> None:
        """Wait until no lease holder is left. New ones are admitted in the engines' phase only."""
        with waiting("devices", why=lambda: f"{self._num_holders} engine starts or evaluations"):
            await self._no_holders.wait()
