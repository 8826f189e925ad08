"""The first hop of routing: an SGLang payload, narrowed while it arrives.

SGLang sends base64 of int32 `[rows, all layers, K]` in the last event of a call, 67 MB of text for 32k tokens
of a model with 48 layers and 8 experts a token; we keep a fifth of that or less. So the text is never held as
a whole: as it comes off the socket it goes, a megabyte at a time and in a thread, through the cache into a
slab that was used before.

```
socket ─► EventReader ─► RoutingText.write ─► narrow, in a thread ─► rows in a slab ─► RoutingPayload
          event loop     event loop           base64, layers, width, range
```

Only a few payloads are read at a time (`receiving`): what an aborted engine sends at once, for hundreds of
calls, would otherwise hold up the event loop and fill the memory. The others wait in their connections.
"""

from __future__ import annotations

import asyncio
import math
import weakref
from typing import Final

import msgspec
import numpy as np
import pybase64

from async_rl import routing
from async_rl.engine_protocol import EngineFacts
from async_rl.engines.sglang.slabs import Slabs
from async_rl.errors import AlignmentError
from async_rl.types import ExpertIdArray

_BLOCK_BYTES: Final = 1 << 18
"""Of a payload that are decoded at once: with what they become, they fit the second-level cache."""

PIECE_BYTES: Final = 1 << 20
"""Of text that are worth a thread's attention."""

_SPARE_ROWS: Final = 64
"""Room for tokens that come with the last event, which nobody has counted when its payload begins."""

_MAX_RECEIVING: Final = 4
"""Payloads that are read at a time on one event loop: each keeps a thread busy about as long as the loop."""

SLABS: Final = Slabs(max_idle_bytes=1 << 28)
"""Where narrow rows live. They go when a trajectory is in the spool, or is dropped."""

_gates: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()


def receiving() -> asyncio.Semaphore:
    """Whoever reads a large payload holds this meanwhile."""
    loop = asyncio.get_running_loop()
    if (gate := _gates.get(loop)) is None:
        gate = _gates[loop] = asyncio.Semaphore(_MAX_RECEIVING)
    return gate


class RoutingWire(msgspec.Struct, frozen=True, kw_only=True):
    """How one server writes routing: SGLang's own way, or narrowed at its side (`narrow_launcher.py`)."""

    facts: EngineFacts
    narrow: bool = False

    @property
    def row_ids(self) -> int:
        """Expert ids of a row, as sent."""
        layers = len(self.facts.moe_layers) if self.narrow else self.facts.num_layers
        return layers * self.facts.top_k

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """Of an id, as sent. A negative one becomes one that is too large."""
        return routing.id_dtype(self.facts.num_experts) if self.narrow else np.dtype("<u4")

    @property
    def row_bytes(self) -> int:
        """Of a row, as sent, before base64."""
        return self.row_ids * self.dtype.itemsize

    def text_length(self, num_rows: int) -> int:
        """Characters of base64 that so many rows make."""
        return -(-num_rows * self.row_bytes // 3) * 4

    def decode(self, text: bytes | memoryview, num_rows: int) -> ExpertIdArray:
        """Rows of a text that is there as a whole: `[num_rows, L_moe, K]`, uint8 or uint16.

        Raises:
            AlignmentError: When it is not base64, of another length, or names an expert that does not exist.
        """
        reader = RoutingText(self, num_rows)
        reader.write(text)
        return reader.rows(num_rows)


class RoutingText:
    """The base64 of one payload: `write` what comes, `narrow` it in a thread now and then, take the `rows`.

    What is wrong with the text is kept until the rows are asked for, as most are asked for much later.
    """

    def __init__(self, wire: RoutingWire, num_rows: int) -> None:
        """Expect about so many rows; more find room, too."""
        facts = wire.facts
        self.pending = 0
        """Characters that were written and not yet narrowed."""
        self._wire = wire
        self._length = 0
        self._pieces: list[bytes | memoryview] = []
        self._rest = b""  # less than a unit
        self._fault: str | None = None
        self._shape = (len(facts.moe_layers), facts.top_k)
        self._dtype = routing.id_dtype(facts.num_experts)
        self._rows = np.empty((0, *self._shape), self._dtype)  # until there is something to put into them
        self._expected = num_rows + _SPARE_ROWS
        self._num_rows = 0
        # The fewest rows that are whole groups of three bytes.
        self._unit = wire.row_bytes * (3 // math.gcd(3, wire.row_bytes)) // 3 * 4
        first, last = facts.moe_layers[0], facts.moe_layers[-1]
        together = last - first + 1 == len(facts.moe_layers)
        self._layers: slice | list[int] = slice(first, last + 1) if together else list(facts.moe_layers)
        if wire.narrow:
            self._layers = slice(None)

    def write(self, piece: bytes | memoryview) -> None:
        """Take what came."""
        if piece:
            self._pieces.append(piece)
            self._length += len(piece)
            self.pending += len(piece)

    def narrow(self) -> None:
        """Turn what is whole of it into rows. Releases the GIL for nearly all of it: call it in a thread."""
        pieces, self._pieces, self.pending = self._pieces, [], 0
        for piece in pieces:
            view = memoryview(piece)
            if self._rest:
                missing = self._unit - len(self._rest)
                self._rest += view[:missing]
                view = view[missing:]
                if len(self._rest) < self._unit:
                    continue
                self._decode(memoryview(self._rest))
            end = len(view) // self._unit * self._unit
            self._decode(view[:end])
            self._rest = bytes(view[end:])

    def rows(self, num_rows: int) -> ExpertIdArray:
        """All rows, `[num_rows, L_moe, K]`, read-only, on memory of `SLABS`.

        Raises:
            AlignmentError: See `RoutingWire.decode`.
        """
        self.narrow()
        wire, facts = self._wire, self._wire.facts
        if self._length != wire.text_length(num_rows):
            size = self._length * 3 // 4 - self._rest[-2:].count(b"=")
            raise AlignmentError(
                f"{size // wire.dtype.itemsize} expert ids came, expected {num_rows} rows x "
                f"{wire.row_ids // facts.top_k} layers x {facts.top_k} = {num_rows * wire.row_ids}"
                + self._hint(num_rows)
            )
        end, self._rest = self._rest, b""
        self._decode(memoryview(end))
        if self._fault is not None:
            raise AlignmentError(self._fault)
        if self._num_rows != num_rows:
            raise AlignmentError(f"{self._num_rows} routing rows came, expected {num_rows}")
        rows = self._rows[:num_rows]
        rows.flags.writeable = False
        return rows

    def _hint(self, num_rows: int) -> str:
        """What to do when the text is just as long as the other wire's."""
        other = RoutingWire(facts=self._wire.facts, narrow=not self._wire.narrow)
        if self._length != other.text_length(num_rows):
            return ""
        kinds = ("int32 of all layers", "narrow ids of the MoE layers")
        return (
            f". It is as long as {kinds[other.narrow]} would be: the server was started "
            f"{'with' if other.narrow else 'without'} engine.narrow_routing, and this run expects "
            f"{kinds[self._wire.narrow]}"
        )

    def _decode(self, text: memoryview) -> None:
        """Whole rows of text, block by block.

        Each block stays in the cache from the base64 to the narrow ids: a quarter of the time that passes
        over the whole take, which is mostly touching fresh memory.
        """
        facts, wire = self._wire.facts, self._wire
        largest_possible = int(np.iinfo(wire.dtype).max)
        step = self._unit * max(1, _BLOCK_BYTES // self._unit)
        for begin in range(0, len(text), step):
            if self._fault is not None:
                return
            try:
                ids = np.frombuffer(pybase64.b64decode(text[begin : begin + step], validate=True), wire.dtype)
                block = ids.reshape(-1, wire.row_ids // facts.top_k, facts.top_k)[:, self._layers]
            except ValueError as e:
                self._fault = f"routing that is not base64 of {wire.dtype} in whole rows: {e}"
                return
            largest = int(block.max(initial=0)) if facts.num_experts <= largest_possible else 0
            if largest >= facts.num_experts:
                found = largest - (1 << 32) if largest >> 31 else largest
                self._fault = f"expert id {found} outside [0, {facts.num_experts})"
                return
            self._append(block)

    def _append(self, block: np.ndarray) -> None:
        end = self._num_rows + len(block)
        if end > len(self._rows):
            rows = SLABS.empty((max(self._expected, 2 * len(self._rows), end), *self._shape), self._dtype)
            rows[: self._num_rows] = self._rows[: self._num_rows]
            self._rows = rows
        self._rows[self._num_rows : end] = block
        self._num_rows = end
