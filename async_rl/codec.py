"""The serializer of the program: a header by msgspec and arrays as raw aligned bytes, both with a checksum.

```
0          32            payload (multiple of 64)                                  nbytes
├─ prefix ─┼─ header ─ 0… ─┼─ array 0 ─ 0… ─┬─ array 1 ─ 0… ─┬─ … ─────────────────┤
│ magic, format version, sizes, crc32c of the payload, crc32c of all before the payload
```

The header is the msgpack of (name of the type, object); each array in it is an extension of (code of the
dtype, offset, shape). Arrays are little-endian, C-contiguous and 64-byte aligned: a reader maps a frame and
reads it without a copy. A frame is a prefix of its buffer: what follows it is ignored.
Nothing is ever unpickled.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from pathlib import Path
from typing import Any, TypeVar

import google_crc32c
import msgspec
import numpy as np
import numpy.typing as npt

from async_rl.errors import CorruptFrame

T = TypeVar("T")
Bytes = npt.NDArray[np.uint8]
Buffer = bytes | bytearray | memoryview | mmap.mmap | Bytes

FORMAT_VERSION = 1
ALIGNMENT = 64
"""A cache line, and the widest vector register that exists."""

_MAGIC = b"ASYNCRL\0"
_PREFIX = struct.Struct("<8sHHIQI")  # magic, version, reserved, header bytes, payload bytes, payload crc
_HEAD_CRC = struct.Struct("<I")
_PREFIX_BYTES = _PREFIX.size + _HEAD_CRC.size
_header = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
_ARRAY = 1
"""The code of the msgpack extension that represents an array."""

_DTYPES = tuple(
    np.dtype(name).newbyteorder("<")
    for name in ("bool", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")
)
"""The index in this tuple is the code of the type in a frame: append only."""
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_DESCRIBED = tuple(struct.Struct(f"<BQ{ndim}Q") for ndim in range(9))  # dtype, offset, shape
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""The errors that msgspec raises for an unreadable header."""
_MAX_SIDES = 1 << 62
"""The limit for the bytes of an array when sides of length 0 count as 1."""
_READ_BYTES = 1 << 20
_CHUNK = 256 << 10
"""The bytes that are summed at once, under the interpreter lock: the event loop can run in between."""


class Frame:
    """One encoded object: its head, and its arrays where they are.

    The arrays are never copied: do not change them before the frame was written.
    """

    def __init__(self, obj: Any) -> None:
        """Encode the header of `obj`.

        Raises:
            TypeError: When it contains something else than msgpack types, numpy scalars and arrays of known
                dtypes.
        """
        self.kind: str = type(obj).__name__
        self._arrays: list[tuple[int, Bytes]] = []
        self._end = 0
        self._header = msgspec.msgpack.Encoder(enc_hook=self._replace).encode((self.kind, obj))
        self._payload_bytes = self._end
        self._start = _align(_PREFIX_BYTES + len(self._header))
        self.checksum = 0
        """The sum in the head, which identifies the frame (`checksum_of`); 0 before `buffers`."""

    @property
    def nbytes(self) -> int:
        """The size of the whole frame."""
        return self._start + self._payload_bytes

    def buffers(self) -> list[bytes | memoryview]:
        """Return the frame in pieces; the arrays are views of the original ones."""
        pieces: list[bytes | memoryview] = []
        position = crc = 0
        for offset, flat in self._arrays:
            if offset > position:
                padding = bytes(offset - position)
                crc = google_crc32c.extend(crc, padding)
                pieces.append(padding)
            crc = _extend(crc, flat)
            pieces.append(flat.data)
            position = offset + flat.nbytes
        return [self._head(crc), *pieces]

    def _replace(self, value: Any) -> Any:
        """Replace an array by an extension, and a numpy scalar by a plain number."""
        if isinstance(value, np.generic):
            return value.item()
        if not isinstance(value, np.ndarray):
            raise TypeError(f"cannot encode a {type(value).__name__}: only msgpack types and numpy arrays")
        code = _CODES.get(value.dtype)
        if code is None or value.ndim >= len(_DESCRIBED):
            raise TypeError(
                f"cannot encode an array of {value.ndim} dimensions of {value.dtype}: known are "
                f"{', '.join(dtype.name for dtype in _DTYPES)}, little-endian, up to {len(_DESCRIBED) - 1}"
            )
        offset = _align(self._end)
        flat = value.reshape(-1) if value.flags.c_contiguous else value.ravel()
        self._arrays.append((offset, flat.view(np.uint8)))
        self._end = offset + value.nbytes
        return msgspec.msgpack.Ext(_ARRAY, _DESCRIBED[value.ndim].pack(code, offset, *value.shape))

    def _head(self, payload_crc: int) -> bytes:
        prefix = _PREFIX.pack(_MAGIC, FORMAT_VERSION, 0, len(self._header), self._payload_bytes, payload_crc)
        padded = self._header + bytes(self._start - _PREFIX_BYTES - len(self._header))
        self.checksum = google_crc32c.extend(google_crc32c.value(prefix), padded)
        return prefix + _HEAD_CRC.pack(self.checksum) + padded


def encode(obj: Any) -> list[bytes | memoryview]:
    """Encode into pieces that, concatenated, are the frame. Arrays are viewed, not copied.

    Raises:
        TypeError: As `Frame`.
    """
    return Frame(obj).buffers()


def encoded_size(buffers: list[bytes | memoryview]) -> int:
    """Return the size of all pieces together."""
    return sum(len(piece) for piece in buffers)


def decode(buffer: Buffer, expected: type[T]) -> T:
    """Decode the frame at the beginning of a buffer.

    Args:
        buffer: Any contiguous buffer; the arrays of the result are read-only views that keep it alive.
        expected: The type that the frame must hold.

    Raises:
        CorruptFrame: When the frame is cut short, fails a checksum, is of an unknown format or holds
            something else. The message says which.
    """
    header, payload = _split(buffer)

    def array(code: int, described: memoryview) -> npt.NDArray[Any]:
        ndim = (len(described) - _DESCRIBED[0].size) // 8
        if code != _ARRAY or not 0 <= ndim < len(_DESCRIBED) or len(described) != _DESCRIBED[ndim].size:
            raise CorruptFrame(f"header holds an unknown extension, {code} of {len(described)} bytes")
        name, offset, *shape = _DESCRIBED[ndim].unpack(described)
        if name >= len(_DTYPES):
            raise CorruptFrame(f"array of unknown dtype {name}")
        dtype = _DTYPES[name]
        size = math.prod(shape, start=dtype.itemsize)
        # Beside a side of length 0, others may have any length: numpy refuses those that it cannot multiply.
        sides = math.prod((side or 1 for side in shape), start=dtype.itemsize)
        if offset + size > len(payload) or sides > _MAX_SIDES:
            raise CorruptFrame(
                f"array at {offset} of {size} bytes, shape {shape}, is outside {len(payload)} of payload"
            )
        return np.ndarray(shape, dtype, payload, offset)

    kind, body = _open(header)
    if kind != expected.__name__:
        raise CorruptFrame(f"frame holds a {kind}, expected a {expected.__name__}")
    try:
        return msgspec.msgpack.decode(body, type=expected, dec_hook=pass_array, ext_hook=array)
    except UNREADABLE as error:
        raise CorruptFrame(f"header is no {expected.__name__} of this program: {error}") from error


class FrameHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a frame by itself."""

    kind: str
    nbytes: int
    checksum: int


def inspect(buffer: Buffer, *, verify: bool = True) -> FrameHeader:
    """Verify the frame at the beginning of a buffer without knowing its type.

    Args:
        buffer: As in `decode`.
        verify: Whether to check the sum of the payload as well; the head is always verified.

    Raises:
        CorruptFrame: When there is none, or not a whole one.
    """
    header, payload = _split(buffer, verify=verify)
    kind, _ = _open(header)
    nbytes = _align(_PREFIX_BYTES + len(header)) + len(payload)
    return FrameHeader(kind=kind, nbytes=nbytes, checksum=checksum_of(buffer))


def checksum_of(buffer: Buffer) -> int:
    """Return the sum in the head of a frame that was verified: it covers the header and the payload's sum."""
    checksum: int = _HEAD_CRC.unpack_from(np.frombuffer(buffer, np.uint8).data, _PREFIX.size)[0]
    return checksum


def write_frame(path: str | os.PathLike[str], obj: Any) -> int:
    """Write a frame as a file that appears when it is complete; return its size in bytes.

    The file survives the death of the process. It is not flushed to the disk: after a power cut the checksum
    shows whether it is complete.
    """
    path = Path(path)
    pieces = encode(obj)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.writelines(pieces)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return encoded_size(pieces)


def read_frame(path: str | os.PathLike[str], expected: type[T]) -> T:
    """Map a file and decode the frame in it; the arrays keep the mapping alive.

    Raises:
        CorruptFrame: As `decode`; the message names the file.
        FileNotFoundError: When there is no such file.
    """
    try:
        return decode(map_file(path), expected)
    except CorruptFrame as error:
        raise CorruptFrame(f"{os.fspath(path)}: {error}") from error


def map_file(path: str | os.PathLike[str]) -> Buffer:
    """Map a whole file read-only, once it has been read: a page that a disk fails to read ends the process.

    Raises:
        OSError: It cannot be read.
    """
    with Path(path).open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return b""  # an empty file cannot be mapped
        position, piece = 0, bytearray(_READ_BYTES)
        while read := os.preadv(file.fileno(), [piece], position):
            position += read
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _split(buffer: Buffer, *, verify: bool = True) -> tuple[memoryview, Bytes]:
    """Verify the head of a frame, and its payload with `verify`; return its header and its payload."""
    data: Bytes = np.frombuffer(buffer, np.uint8)
    data.flags.writeable = False
    if len(data) < _PREFIX_BYTES:
        raise CorruptFrame(f"{len(data)} bytes are shorter than the prefix of a frame, {_PREFIX_BYTES}")
    magic, version, _, header_bytes, payload_bytes, payload_crc = _PREFIX.unpack_from(data.data)
    if magic != _MAGIC:
        raise CorruptFrame(f"bad magic {magic!r}, expected {_MAGIC!r}")
    if version != FORMAT_VERSION:
        raise CorruptFrame(f"frame of format version {version}, this program reads {FORMAT_VERSION}")
    start = _align(_PREFIX_BYTES + header_bytes)
    if start + payload_bytes > len(data):
        raise CorruptFrame(f"cut short: {len(data)} bytes of a frame of {start + payload_bytes}")
    crc = google_crc32c.extend(google_crc32c.value(data[: _PREFIX.size]), data[_PREFIX_BYTES:start])
    if crc != _HEAD_CRC.unpack_from(data.data, _PREFIX.size)[0]:
        raise CorruptFrame("head fails its checksum")
    header = data.data[_PREFIX_BYTES : _PREFIX_BYTES + header_bytes]
    payload = data[start : start + payload_bytes]
    if verify and _extend(0, payload) != payload_crc:
        raise CorruptFrame(f"payload of {payload_bytes} bytes fails its checksum")
    return header, payload


def _open(header: memoryview) -> tuple[str, msgspec.Raw]:
    """Return the name of the type in a frame, and the object, not decoded yet."""
    try:
        return _header.decode(header)
    except UNREADABLE as error:
        raise CorruptFrame(f"header is no pair of a name and an object: {error}") from error


def pass_array(expected: type, value: Any) -> Any:
    """Accept arrays where arrays are declared; `decode` has created them from their extension."""
    if not isinstance(value, expected):
        raise TypeError(f"expected {expected.__name__}, found {value.__class__.__name__}")
    return value


def _extend(crc: int, data: Bytes) -> int:
    for begin in range(0, len(data), _CHUNK):
        crc = google_crc32c.extend(crc, data[begin : begin + _CHUNK])
    return crc


def _align(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT
