"""Shortages that the harness brings about: of file descriptors, of disk space, and of the reward server."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from verification.chaos import reward


class DescriptorShortage:
    """Lowers the soft limit of open files of a process to what it has open, and follows it downwards.

    No privilege is needed: the hard limit stays, so that `end` can raise the soft limit again.

    Example:
        >>> shortage = DescriptorShortage(pid)
        >>> shortage.tighten()
        True
        >>> shortage.end()
    """

    def __init__(self, pid: int) -> None:
        """Remember the limit; change nothing."""
        self._pid = pid
        self._soft, self._hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        self._limit = self._soft

    def tighten(self) -> bool:
        """Lower the limit to the free descriptors' end; return whether no descriptor is free.

        A process that has ended has some.
        """
        with suppress(ProcessLookupError, FileNotFoundError):
            taken = {int(name) for name in os.listdir(f"/proc/{self._pid}/fd")}
            first_free = next(i for i in range(len(taken) + 1) if i not in taken)
            if first_free < self._limit:
                self._limit = max(1, first_free)
                resource.prlimit(self._pid, resource.RLIMIT_NOFILE, (self._limit, self._hard))
            taken = {int(name) for name in os.listdir(f"/proc/{self._pid}/fd")}
            return all(i in taken for i in range(self._limit))
        return False

    def end(self) -> None:
        """Restore the limit."""
        with suppress(ProcessLookupError):
            resource.prlimit(self._pid, resource.RLIMIT_NOFILE, (self._soft, self._hard))


class FullDisk:
    """Fills a small file system to its last block, as another program would, and frees it again."""

    def __init__(self, mount: Path) -> None:
        """Fill nothing yet.

        Args:
            mount: A folder on a file system that is small, for only the run is to be affected.
        """
        self._ballast = mount / "ballast"

    def fill(self) -> bool:
        """Take all blocks that are free; return whether none were left then."""
        # Without a buffer, a short write takes the last blocks.
        with self._ballast.open("ab", buffering=0) as ballast, suppress(OSError):
            os.chmod(self._ballast, 0o600)
            while free := shutil.disk_usage(self._ballast.parent).free:
                ballast.write(bytes(min(free, 1 << 20)))
        return shutil.disk_usage(self._ballast.parent).free == 0

    def free(self) -> None:
        """Free the blocks."""
        self._ballast.unlink(missing_ok=True)


class RewardServer:
    """The process of the reward server, which is no process of the run."""

    def __init__(self, url: str) -> None:
        """Start nothing; `url` is that of its requests."""
        self._port = urlsplit(url).port
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; it listens within a second."""
        self._process = subprocess.Popen(
            [sys.executable, reward.__file__, str(self._port)], stdin=subprocess.DEVNULL
        )

    def kill(self) -> None:
        """Kill it, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
