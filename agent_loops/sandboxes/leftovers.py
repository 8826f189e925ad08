"""Ends what processes that have ended have left. Also a program, which the reaper of a process runs.

```
 process killed ──► its reaper runs this program with its log         within seconds
 both killed    ──► the next process of the run finds the log         at its start, and every minute
 host lost      ──► the same, once the log was silent for a while; else the backend's time to live
```
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from agent_loops.sandboxes.log import Owner, Record, read_log
from agent_loops.sandboxes.protocol import SandboxBackend
from agent_loops.sandboxes.settings import parse_backend
from async_rl.errors import AsyncRLError

log = logging.getLogger(__name__)

SILENT_S: Final = 600.0
"""A log of another host, or of this one before it was started again, whose owner has not touched it for this
long has no owner any more. Owners touch theirs each minute."""
_AGAIN_S: Final = 5.0
"""Time for a backend to create what it was asked for when the owner was killed, before a second look."""
_ROOT: Final = Path(__file__).parents[2]


def release_command(path: Path) -> list[str]:
    """Return the command that ends everything in a log."""
    code = (
        f"import sys; sys.path.insert(0, {str(_ROOT)!r})\n"
        "from agent_loops.sandboxes.leftovers import main\nmain()"
    )
    return [sys.executable, "-c", code, str(path.absolute())]


def main() -> None:
    """End everything in the log that the first argument names, if it is still there."""
    try:
        path = Path(sys.argv[1])
        owner, records = read_log(path)
        asyncio.run(_end_twice(owner, records))
        path.unlink(missing_ok=True)
    except FileNotFoundError:
        pass
    except (OSError, msgspec.MsgspecError, AsyncRLError) as error:
        sys.exit(f"sandboxes in {sys.argv[1]} cannot be ended: {error}")


async def end_leftovers(folder: Path, own: Path) -> None:
    """End what is in the logs of a folder whose owners have ended; `own` is the log of this process."""
    for path in await asyncio.to_thread(lambda: sorted(folder.glob("*.jsonl"))):
        try:
            if path != own and await asyncio.to_thread(_is_left, path):
                owner, records = await asyncio.to_thread(read_log, path)
                log.info("%d sandboxes of process %d, which has ended, are ended", len(records), owner.pid)
                await _end_records(owner, records)
                await asyncio.to_thread(path.unlink, missing_ok=True)
        except (OSError, msgspec.MsgspecError, AsyncRLError) as error:
            log.warning("sandboxes in %s cannot be ended now: %s", path, error)


async def end_names(backend: SandboxBackend, records: Iterable[Record]) -> None:
    """End sandboxes and snapshots one after the other.

    Raises:
        SandboxLost: The backend does not answer.
    """
    for record in records:
        await (backend.end_snapshot if record.is_snapshot else backend.end)(record.begin)


def _is_left(path: Path) -> bool:
    owner, _ = read_log(path)
    if owner.is_of_this_boot:
        return not owner.runs
    return time.time() - path.stat().st_mtime > SILENT_S


async def _end_records(owner: Owner, records: Iterable[Record]) -> None:
    async with parse_backend(owner.backend).open_backend("") as backend:
        await end_names(backend, records)


async def _end_twice(owner: Owner, records: list[Record]) -> None:
    if records:
        await _end_records(owner, records)
        await asyncio.sleep(_AGAIN_S)
        await _end_records(owner, records)
