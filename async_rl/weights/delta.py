"""Encodes the changes between two weight versions as a file, and applies them.

```
 trainer         compare with the kept version as integers ─► positions, differences ─► zlib ─► file
 engine's host   copy of the last folder ─► add the differences ─► folder of the next version
```

A small learning rate leaves most bfloat16 weights unchanged, and moves the others to the next value: the gaps
between the changed positions and the differences of the bit patterns are small numbers. A section of a tensor
that this does not compress is sent unchanged. Only bit patterns are compared, so that -0.0 and the payloads
of NaNs are preserved.

A delta is a folder with a file of each rank, of the tensors that it owns. A file ends with its header and a
checksum over the file. The header has the number of files, and a checksum of each tensor before and after:
differences are only added to the weights they were computed from, and only a result that equals the
trainer's bit for bit is used. Checksums are CRC-32C, against damage rather than attacks.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal

import google_crc32c
import msgspec
import numpy as np
from numpy.typing import NDArray

from async_rl.errors import WeightSyncError

Raw = NDArray[np.uint8]
"""The bytes of a tensor, `[num_bytes]`."""

Refusal = Literal["no_actor", "base", "damaged", "failed"]
"""Why whole files are loaded in place of a delta; the label of `weight_delta_fallbacks_total`.

no_actor: the server was not started by us, so its host has no weight folder.
base: the folder has another version, or was changed; also after a restart of the actor that holds it.
damaged: the file differs from what was written.
failed: not enough space, or no answer in time.
"""

_MAGIC: Final = b"weightsd"
_TAIL: Final = struct.Struct("<QI")
"""Length of the header, checksum over all bytes before this field."""
_SECTION: Final = struct.Struct("<BIII")
"""Section header: whether it is sent whole; changed elements, bytes of positions, bytes of differences."""
_ELEMENTS: Final = 1 << 22
"""Elements of a section at most: bounds the extra memory, and keeps gaps within 32 bits."""
_LEVEL: Final = 1
"""Compression level of zlib. Higher levels take several times as long for a few percent."""


class DeltaRefused(WeightSyncError):
    """A delta cannot be applied; whole files can still be loaded."""

    def __init__(self, message: str, reason: Refusal) -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.reason)


class Change(msgspec.Struct, frozen=True):
    """The change of one tensor in a delta."""

    name: str
    itemsize: int
    """Bytes of an element: 1, 2, 4 or 8."""
    num_bytes: int
    """Bytes of the tensor."""
    start: int
    """Offset in the file at which its sections begin."""
    end: int
    before: int
    """Checksum of its bytes in the base version."""
    after: int


class DeltaHeader(msgspec.Struct, frozen=True):
    """The versions and tensors of a delta."""

    base: int
    version: int
    changes: tuple[Change, ...]
    num_files: int
    """Files of the whole delta."""


class DeltaWriter:
    """Writes the changes since the version before, and keeps a copy of that version."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Raw, int]] = {}
        """Bytes and their checksum, by name."""
        self._version: int | None = None

    def write_delta(
        self,
        tensors: Iterable[tuple[str, int, Raw]],
        path: Path,
        base: int | None,
        version: int,
        *,
        num_files: int = 1,
    ) -> bool:
        """Keep a version, and write its changes if the version kept before is the base.

        Args:
            tensors: Name, bytes per element, all bytes; the same names and sizes each time. The bytes may be
                overwritten when the next tensor is requested.
            path: The file; it is created atomically.
            base: The version that receivers have; None to write no file.
            version: The version of the tensors.
            num_files: Files of the whole delta.

        Returns:
            Whether a file was written.
        """
        writes = base is not None and base == self._version
        self._version = None  # until all tensors are kept
        if not writes:
            for name, _, new in tensors:
                self._keep(name, new)
            self._version = version
            return False
        scratch = path.with_name(f".{path.name}.tmp")
        scratch.parent.mkdir(parents=True, exist_ok=True)
        assert base is not None, "checked above"
        with scratch.open("wb") as file:
            out = _ChecksumWriter(file)
            out.write(_MAGIC)
            changes = []
            for name, itemsize, new in tensors:
                (old, before), start = self._kept[name], out.size
                after = google_crc32c.value(new)
                for part in encode(old, new, itemsize):
                    out.write(part)
                old[:] = new
                self._kept[name] = (old, after)
                changes.append(Change(name, itemsize, len(new), start, out.size, before, after))
            header = msgspec.json.encode(DeltaHeader(base, version, tuple(changes), num_files))
            out.write(header)
            out.write(struct.pack("<Q", len(header)))
            file.write(struct.pack("<I", out.sum))
        scratch.rename(path)
        self._version = version
        return True

    def _keep(self, name: str, new: Raw) -> None:
        kept = self._kept[name][0] if name in self._kept else np.empty_like(new)
        kept[:] = new
        self._kept[name] = kept, google_crc32c.value(kept)


def encode(old: Raw, new: Raw, itemsize: int) -> Iterable[bytes]:
    """Yield the sections of a tensor, in order."""
    dtype = np.dtype(f"<u{itemsize}")
    olds, news = old.view(dtype), new.view(dtype)
    for start in range(0, len(news), _ELEMENTS):
        before, after = olds[start : start + _ELEMENTS], news[start : start + _ELEMENTS]
        changed = np.flatnonzero(before != after)
        gaps = _pack(np.diff(changed, prepend=0).astype("<u4"))
        steps = _pack(after[changed] - before[changed])
        if len(gaps) + len(steps) < after.nbytes:
            yield _SECTION.pack(False, len(changed), len(gaps), len(steps)) + gaps + steps
        else:
            yield _SECTION.pack(True, len(after), 0, after.nbytes) + after.tobytes()


def decode(data: Raw, target: Raw, itemsize: int) -> None:
    """Change the old tensor that `encode` received into the new one, in place.

    Raises:
        DeltaRefused: When the data does not fit the tensor.
    """
    dtype = np.dtype(f"<u{itemsize}")
    elements = target.view(dtype)
    try:
        for start in range(0, len(elements), _ELEMENTS):
            part = elements[start : start + _ELEMENTS]
            whole, count, num_gaps, num_steps = _SECTION.unpack(data[: _SECTION.size].tobytes())
            gaps = data[_SECTION.size : _SECTION.size + num_gaps]
            steps = data[_SECTION.size + num_gaps : _SECTION.size + num_gaps + num_steps]
            if whole:
                part[:] = steps.view(dtype)
            else:
                part[np.cumsum(_unpack(gaps, np.dtype("<u4"), count), dtype=np.int64)] += _unpack(
                    steps, dtype, count
                )
            data = data[_SECTION.size + num_gaps + num_steps :]
    except (struct.error, zlib.error, ValueError, IndexError) as error:
        raise DeltaRefused(f"a delta does not fit its tensor: {error}", "damaged") from error
    if len(data):
        raise DeltaRefused(f"a delta is {len(data)} bytes longer than its tensor asks for", "damaged")


def read_header(data: Raw) -> DeltaHeader:
    """Check the checksum of a whole file, and return its header.

    Raises:
        DeltaRefused: When the file is damaged.
    """
    tail = len(data) - _TAIL.size
    if tail < len(_MAGIC) or data[: len(_MAGIC)].tobytes() != _MAGIC:
        raise DeltaRefused(f"not a delta, or truncated: {len(data)} bytes", "damaged")
    length, expected = _TAIL.unpack(data[tail:].tobytes())
    found = google_crc32c.value(data[:-4])
    if found != expected:
        raise DeltaRefused(f"a delta sums to {found:08x}, expected {expected:08x}", "damaged")
    return msgspec.json.decode(data[tail - length : tail].tobytes(), type=DeltaHeader)


class _ChecksumWriter:
    """Writes to a file, and keeps its size and checksum."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size = 0
        self.sum = 0

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self.size += len(data)
        self.sum = google_crc32c.extend(self.sum, data)


def _pack(values: NDArray[Any]) -> bytes:
    """Compress numbers byte plane by byte plane: the planes of the high bytes are nearly all zero."""
    planes = values.view(np.uint8).reshape(-1, values.itemsize).T
    return zlib.compress(planes.tobytes(), _LEVEL)


def _unpack(data: Raw, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    planes = np.frombuffer(zlib.decompress(data.tobytes()), np.uint8).reshape(dtype.itemsize, count)
    return np.ascontiguousarray(planes.T).view(dtype).reshape(-1)
