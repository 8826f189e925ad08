"""The first hop of routing: narrows an SGLang payload while it arrives.

SGLang sends base64 of int32 `[rows, all layers, K]` in the last event of a call, 67 MB of text for 32k tokens
of a model with 48 layers and 8 experts per token; we keep a fifth of that or less. The text is never held as
a whole: a megabyte at a time, a thread decodes it from the socket buffer, within the CPU cache.

```
socket ─► EventReader ─► RoutingText.append_text ─► decode_pending, in a thread ─► rows ─► RoutingPayload
          event loop     event loop                 base64, layers, width, range
```

Only a few payloads of an engine are read at a time (`PayloadGate`): what it sends at once, for hundreds of
calls, would otherwise block the event loop and fill the memory. The others wait in their connections.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

import msgspec
import numpy as np
import pybase64

from async_rl import routing
from async_rl.engine_protocol import EngineFacts
from async_rl.errors import AlignmentError, EngineTimeout
from async_rl.types import ExpertIdArray

_BLOCK_BYTES: Final = 1 << 18
"""Text that is decoded at once: together with its rows it fits the second-level cache."""

PIECE_BYTES: Final = 1 << 20
"""Text that is worth handing to a thread."""

_SPARE_ROWS: Final = 64
"""Capacity for the tokens of the last event, which are not counted yet when its payload begins."""

MAX_RECEIVING: Final = 4
"""Payloads of one engine that are read at a time: each keeps a thread busy about as long as the loop."""


class PayloadGate:
    """Lets a few payloads of one engine be read at a time, and bounds how slowly each may arrive.

    Invariant: an engine that stops in the middle of its payloads, or sends them byte by byte, holds up no
    other engine, because each has its own gate, and holds a permit for at most `stall_s` per megabyte.
    """

    def __init__(self, engine_id: str, stall_s: float) -> None:
        """Start with all permits free.

        Args:
            engine_id: Name of the engine in errors.
            stall_s: Longest time that `PIECE_BYTES` of a payload may take.
        """
        self._engine_id = engine_id
        self._stall_s = stall_s
        self._permits = asyncio.Semaphore(MAX_RECEIVING)

    @property
    def is_full(self) -> bool:
        """Whether a further payload has to wait."""
        return self._permits.locked()

    @asynccontextmanager
    async def permit(self) -> AsyncIterator[PayloadArrival]:
        """Wait until a payload may be read, and read it in the block."""
        async with self._permits:
            yield PayloadArrival(self._engine_id, self._stall_s)


class PayloadArrival:
    """The arrival of one payload, whose time is bounded by what has arrived."""

    def __init__(self, engine_id: str, stall_s: float) -> None:
        """Start the time of the first piece."""
        self._engine_id = engine_id
        self._stall_s = stall_s
        self._due_s = 0.0
        self._arrived = 0  # bytes of the piece
        self._halves = 2  # of `stall_s`, that are left
        self._begin_piece()

    async def read_piece(self, read: Callable[[], Awaitable[bytes]]) -> bytes:
        """Return what `read` returns next; `read` can be cancelled and called again.

        Raises:
            EngineTimeout: When fewer than `PIECE_BYTES` came within `stall_s`.
        """
        while self._halves:  # after a stall of our own event loop, only the first of two limits has expired
            try:
                async with asyncio.timeout_at(self._due_s):
                    data = await read()
            except TimeoutError:
                self._halves -= 1
                self._due_s = asyncio.get_running_loop().time() + self._stall_s / 2
                continue
            self._arrived += len(data)
            if self._arrived >= PIECE_BYTES:
                self._begin_piece()
            return data
        raise EngineTimeout(
            f"{self._engine_id} sent {self._arrived} bytes within engine.stall_s = {self._stall_s} in the "
            f"middle of a routing payload, expected {PIECE_BYTES} or its end"
        )

    def _begin_piece(self) -> None:
        self._arrived, self._halves = 0, 2
        self._due_s = asyncio.get_running_loop().time() + self._stall_s / 2


class RoutingWire(msgspec.Struct, frozen=True, kw_only=True):
    """The format in which one server sends routing: SGLang's, or narrowed there (`narrow_launcher.py`)."""

    facts: EngineFacts
    narrow: bool = False

    @property
    def row_ids(self) -> int:
        """Number of expert ids in a row, as sent."""
        layers = len(self.facts.moe_layers) if self.narrow else self.facts.num_layers
        return layers * self.facts.top_k

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """Type of an id, as sent. Unsigned, so that a negative id becomes one that is too large."""
        return routing.id_dtype(self.facts.num_experts) if self.narrow else np.dtype("<u4")

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, as sent, before base64."""
        return self.row_ids * self.dtype.itemsize

    def text_length(self, num_rows: int) -> int:
        """Return the number of base64 characters for a number of rows."""
        return -(-num_rows * self.row_bytes // 3) * 4

    def decode(self, text: bytes | memoryview, num_rows: int) -> ExpertIdArray:
        """Return the rows of a complete text: `[num_rows, L_moe, K]`, uint8 or uint16.

        Raises:
            AlignmentError: When it is not base64, of another length, or names an expert that does not exist.
        """
        reader = RoutingText(self, num_rows, num_rows)
        reader.append_text(text)
        return reader.finish_rows(num_rows)


class RoutingText:
    """The base64 text of one payload, decoded piece by piece.

    Errors in the text are raised by `finish_rows`, because most rows are needed much later. Of a text that is
    longer than twice what the call can need, nothing is kept.
    """

    def __init__(self, wire: RoutingWire, num_rows: int, max_rows: int) -> None:
        """Expect about `num_rows` rows, and at most `max_rows`."""
        facts = wire.facts
        # Twice, and of the wider format, so that `finish_rows` can name the usual mistakes by their length.
        self._max_length = 2 * max(
            RoutingWire(facts=facts, narrow=narrow).text_length(max_rows + 1) for narrow in (False, True)
        )
        self.pending = 0
        """Characters that were appended and not yet decoded."""
        self._wire = wire
        self._length = 0
        self._pieces: list[bytes | memoryview] = []
        self._rest = b""  # an incomplete unit
        self._fault: str | None = None
        self._shape = (len(facts.moe_layers), facts.top_k)
        self._dtype = routing.id_dtype(facts.num_experts)
        self._rows = np.empty((0, *self._shape), self._dtype)  # replaced when the first rows arrive
        self._expected = num_rows + _SPARE_ROWS
        self._num_rows = 0
        # A unit is the smallest number of rows that is a multiple of three bytes, in base64 characters.
        self._unit = wire.row_bytes * (3 // math.gcd(3, wire.row_bytes)) // 3 * 4
        first, last = facts.moe_layers[0], facts.moe_layers[-1]
        together = last - first + 1 == len(facts.moe_layers)
        self._layers: slice | list[int] = slice(first, last + 1) if together else list(facts.moe_layers)
        if wire.narrow:
            self._layers = slice(None)

    def append_text(self, piece: bytes | memoryview) -> None:
        """Append text that arrived."""
        self._length += len(piece)
        if piece and self._length <= self._max_length:
            self._pieces.append(piece)
            self.pending += len(piece)

    @property
    def is_too_long(self) -> bool:
        """Whether the text is longer than any mistake that has a name: the call is not worth reading on."""
        return self._length > self._max_length

    def decode_pending(self) -> None:
        """Decode the complete units of the pending text. Mostly releases the GIL: call it in a thread."""
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

    def finish_rows(self, num_rows: int) -> ExpertIdArray:
        """Return all rows, `[num_rows, L_moe, K]`, read-only.

        Raises:
            AlignmentError: When the text is not what `RoutingWire.decode` accepts.
        """
        self.decode_pending()
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
        """Return the remedy if the text has the length of the other format."""
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
        """Decode whole rows, block by block.

        Each block stays in the CPU cache from the base64 to the narrow ids: this takes a quarter of the time
        of passes over the whole text, which is mostly spent on touching fresh memory.
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
            rows = np.empty((max(self._expected, 2 * len(self._rows), end), *self._shape), self._dtype)
            rows[: self._num_rows] = self._rows[: self._num_rows]
            self._rows = rows
        self._rows[self._num_rows : end] = block
        self._num_rows = end
