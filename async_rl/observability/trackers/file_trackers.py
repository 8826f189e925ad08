"""Trackers that need no service: lines of JSON, lines of text, TensorBoard event files."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import google_crc32c

from async_rl.observability.record_log import RecordLog
from async_rl.runtime.printable import print_text


class JsonlTracker:
    """Logs one line per step: `{"step": 7, "actor/ppo_kl": 0.0, ...}`.

    A repeated step replaces the lines from it on.
    """

    def __init__(self, path: Path) -> None:
        self._records = RecordLog(path, dict[str, Any], lambda record: int(record["step"]))
        self._last = max((record["step"] for record in self._records.read()), default=-1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Implements `Tracker.log`."""
        if step <= self._last:
            self._records.truncate_to(step - 1)
        self._records.append({"step": step, **metrics})
        self._last = step

    def close(self) -> None:
        """Implements `Tracker.close`."""


class ConsoleTracker:
    """Prints one line per step in verl's format: `step:7 - actor/ppo_kl:0.0 - ...`."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Implements `Tracker.log`."""
        shown = " - ".join([f"step:{step}", *(f"{name}:{value:.6g}" for name, value in metrics.items())])
        print_text(shown, flush=True)

    def close(self) -> None:
        """Implements `Tracker.close`."""


class TensorBoardTracker:
    """Writes scalars to an event file for TensorBoard.

    One file per incarnation of a run. Its first step, and one that is repeated, begins a session: from
    there on TensorBoard forgets what earlier files say.

    The libraries that write these files import torch, hundreds of megabytes that the driver does without, and
    a second writer within a second takes over the first one's file. A scalar is four fields.

    Source: framing: tensorflow/core/lib/io/record_writer.cc; fields: tensorflow/core/util/event.proto and
    tensorflow/core/framework/summary.proto.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        name = f"events.out.tfevents.{now:.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("xb")
        self._last: int | None = None
        self._write(_event(now, 0, _field(3, b"brain.Event:2")))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Implements `Tracker.log`."""
        now = time.time()
        if self._last is None or step <= self._last:
            self._write(_event(now, step, _field(7, _SESSION_STARTS)))
        values = b"".join(
            _field(1, _field(1, name.encode()) + b"\x15" + struct.pack("<f", value))
            for name, value in metrics.items()
        )
        self._write(_event(now, step, _field(5, values)))
        self._file.flush()
        self._last = step

    def close(self) -> None:
        """Implements `Tracker.close`."""
        self._file.close()

    def _write(self, data: bytes) -> None:
        length = struct.pack("<Q", len(data))
        self._file.write(length + _masked_crc(length) + data + _masked_crc(data))


_SESSION_STARTS = b"\x08\x01"  # SessionLog.status = START


def _event(wall_time: float, step: int, what: bytes) -> bytes:
    return b"\x09" + struct.pack("<d", wall_time) + b"\x10" + _varint(step) + what


def _field(number: int, data: bytes) -> bytes:
    """Encode bytes, text or a message in protobuf's wire format."""
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def _masked_crc(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
