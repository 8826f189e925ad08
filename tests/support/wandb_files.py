"""Reads the files of wandb's offline mode with wandb's own message types.

The file is a LevelDB log (leveldb/doc/log_format.md) after a header of seven bytes.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

BLOCK = 32768


def offline_run(folder: Path) -> list[Any]:
    """Returns the records of the only offline run below a folder."""
    (file,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    return _records(file.read_bytes())


def history(records: list[Any]) -> dict[int, dict[str, float]]:
    """Returns the logged values by step, without wandb's own keys."""
    found = {}
    for record in records:
        if record.WhichOneof("record_type") == "history":
            items = {
                item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item
            }
            found[items["_step"]] = {key: value for key, value in items.items() if not key.startswith("_")}
    return found


def run_of(records: list[Any]) -> Any:
    """Returns the run of these records."""
    return next(record.run for record in records if record.WhichOneof("record_type") == "run")


def _records(data: bytes) -> list[Any]:
    from wandb.proto.wandb_internal_pb2 import Record

    found, parts, at = [], b"", 7
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:  # the rest of a block is shorter than a header
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            found.append(Record.FromString(parts))
            parts = b""
    return found
