"""What fake sandbox services run on: a folder for each sandbox, in which commands really run.

Absolute paths below `/tmp` are those of the folder; nothing else of a sandbox is isolated.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any


class FakeMachines:
    """The sandboxes of one fake service by id, with what they were asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.requested: dict[str, dict[str, Any]] = {}
        """The bodies of the requests that made those that have not ended."""
        self.images: set[str] = set()
        """Snapshots."""
        self.faults: list[tuple[str, int]] = []
        """Parts of paths, and with which status the next request for each is answered; 0 drops it."""
        self.num_made = 0
        self._processes: dict[str, set[int]] = {}
        """The sessions of programs that run, by sandbox."""
        self.changed = asyncio.Event()

    def fault_of(self, path: str) -> int | None:
        """The status with which a request must fail, once."""
        for fault in self.faults:
            if fault[0] in path:
                self.faults.remove(fault)
                return fault[1]
        return None

    def make(self, key: str, request: dict[str, Any], image: str = "") -> None:
        self.requested[key] = request
        self.num_made += 1
        if image in self.images:
            shutil.copytree(self.image_path(image), self.path(key), symlinks=True)
        else:
            (self.path(key) / "tmp").mkdir(parents=True)
        self._notify()

    def keep(self, key: str, image: str) -> None:
        """Make an image of a sandbox."""
        shutil.copytree(self.path(key), self.image_path(image))

    def image_path(self, image: str) -> Path:
        """The folder of an image, which there is from now on."""
        self.images.add(image)
        return self._folder / f"image-{_plain(image)}"

    def remove(self, key: str) -> bool:
        """End a sandbox; whether there was one."""
        if self.requested.pop(key, None) is None:
            return False
        shutil.rmtree(self.path(key), ignore_errors=True)
        self._notify()
        return True

    def remove_image(self, image: str) -> bool:
        known = image in self.images
        self.images.discard(image)
        return known

    async def until(self, number: int) -> None:
        """Wait until there are as many sandboxes as this."""
        while len(self.requested) != number:
            await self.changed.wait()

    def path(self, key: str, inside: str = "") -> Path:
        return self._folder / _plain(key) / inside.lstrip("/")

    async def run(
        self, key: str, *words: str, stdin: int = asyncio.subprocess.DEVNULL
    ) -> tuple[int, bytes, bytes]:
        """Run a program; its exit code is negative if a signal ended it."""
        root = self.path(key)
        process = await asyncio.create_subprocess_exec(
            *(word.replace("/tmp/", f"{root}/tmp/") for word in words),
            cwd=root,
            stdin=stdin,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        running = self._processes.setdefault(key, set())
        running.add(process.pid)
        try:
            out, err = await process.communicate()
        finally:
            running.discard(process.pid)
        assert process.returncode is not None
        return process.returncode, out, err

    def end_processes(self, key: str) -> None:
        """Kill the programs of a sandbox that run, with the sessions that they lead."""
        for pid in self._processes.get(key, ()):
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def _notify(self) -> None:
        self.changed.set()
        self.changed.clear()


def _plain(name: str) -> str:
    return name.replace("/", "-").replace(":", "-")
