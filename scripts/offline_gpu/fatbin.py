"""Blanks code of a CUDA library that one GPU does not run, so that the library compresses well.

A CUDA library is an ELF file with sections of fatbins, one after the other:

    .nv_fatbin   magic 0xBA55ED50, version, header bytes, bytes of entries | entry | entry | padding | ...
    entry        kind (1: PTX, 2: machine code), version, header bytes, payload bytes, ..., arch | payload

Headers and offsets stay as they are: the driver reads headers, and the payload that it chooses. The format is
not documented; fields were compared with what cuobjdump shows.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SECTIONS = (b".nv_fatbin", b"__nv_relfatbin")
MAGIC = 0xBA55ED50
MACHINE_CODE = 2
HEADER = struct.Struct("<IHHQ")
ENTRY = struct.Struct("<HHIQ12xI")


@dataclass(frozen=True)
class Entry:
    """Code for one architecture (90 for sm_90 and sm_90a), at `start` to `end` of the file."""

    kind: int
    arch: int
    start: int
    end: int


def sections(elf: bytes | mmap.mmap) -> Iterator[tuple[int, int]]:
    """Yield start and end of each section that holds fatbins; none if the file is not ELF of 64 bits."""
    if elf[:5] != b"\x7fELF\x02":
        return
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<I20xQQ", elf, table + size * index) for index in range(count)]
    for name, offset, length in headers:
        start = headers[names][1] + name
        if elf[start : elf.find(b"\0", start)] in SECTIONS:
            yield offset, offset + length


def fatbins(elf: bytes | mmap.mmap, start: int, end: int) -> Iterator[list[Entry]]:
    """Yield the entries of each fatbin of a section."""
    while start < end:
        if end - start < HEADER.size:
            return
        magic, _, header, length = HEADER.unpack_from(elf, start)
        if magic != MAGIC:  # padding between fatbins, which start at multiples of 8
            start += 8
            continue
        position, start = start + header, start + header + length
        if start > end:
            raise ValueError(f"a fatbin ends {start - end} bytes after its section: its format is unknown")
        entries = []
        while position < start:
            kind, _, header, payload, arch = ENTRY.unpack_from(elf, position)
            position += header
            entries.append(Entry(kind, arch, position, position + payload))
            position += payload
        yield entries


def blanked(entries: list[Entry], arch: int) -> list[Entry]:
    """Return the entries of a fatbin that `arch` does without: none where there is no machine code for it."""
    if not any((entry.kind, entry.arch) == (MACHINE_CODE, arch) for entry in entries):
        return []
    return [entry for entry in entries if entry.arch != arch]


def reduce_library(path: Path, arch: int) -> int:
    """Blank what `arch` does not run in a library, and return how many bytes that are."""
    if path.stat().st_size < 64:
        return 0
    total = 0
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as elf:
        for start, end in sections(elf):
            for entries in fatbins(elf, start, end):
                for entry in blanked(entries, arch):
                    elf[entry.start : entry.end] = bytes(entry.end - entry.start)
                    total += entry.end - entry.start
    return total
