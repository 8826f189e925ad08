"""Where a program runs: by default a folder of this host, which is removed after the attempt.

```
 /tmp/async-rl-harness-XXXX/ ── workspace   a fresh copy of the source; the program starts here
                             ├─ home        HOME, XDG folders: its state dies with the attempt
                             ├─ tmp         TMPDIR
                             └─ score-N     what scores it, written after its end
```

A folder is no wall: the program has the rights of this user. docs/security.md says what that means.
`sandbox_place` has a place in a sandbox.
"""

from __future__ import annotations

import asyncio
import difflib
import os
import shutil
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Final, Protocol

import msgspec

from agent_loops.agent_program import AgentProgram, ChildProcess, Program, Start
from async_rl.errors import AgentLoopError, ConfigError
from async_rl.openai_api.endpoint import EndpointAccess
from async_rl.runtime.supervision import Nursery
from async_rl.runtime.threads import run_to_end
from async_rl.runtime.user_processes import ReleasedBy, processes_ended
from async_rl.runtime.waits import sleep_idle
from async_rl.types import Task

_INHERITED: Final = (
    *("PATH", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TZ", "TERM", "SSL_CERT_FILE", "SSL_CERT_DIR"),
    *("REQUESTS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS", "http_proxy", "https_proxy", "no_proxy"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", "all_proxy", "LD_LIBRARY_PATH"),
)
"""Our variables that programs receive: none of them is a key."""
_MEASURED_S: Final = 5.0
"""Time between two measurements of a place while its program runs; no event tells of a folder's size."""
_MAX_DIFFED_BYTES: Final = 1 << 18
"""The largest file whose lines are compared."""
_MAX_COLLECTED_BYTES: Final = 1 << 16
_MAX_NAMES: Final = 1000


UNPACKED: Final[dict[str, Any]] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
"""Keeps an archive inside its folder; Python before 3.11.4 has no filters."""


class Collected(msgspec.Struct, frozen=True, kw_only=True):
    """What a program has left."""

    changed: list[str]
    """Files of the workspace that are new, changed or removed: `+ a.py`, `~ b.py`, `- c.py`."""
    diff: str
    """The lines of those that are text, against a source that is a folder."""
    files: dict[str, str]
    """The beginnings of the files that the patterns name."""


class Place(Protocol):
    """A workspace and what can be done in it: a folder here, or one in a sandbox."""

    workspace: str
    """The folder in which programs start, as they see it."""
    home: str
    local_workspace: Path
    """A folder of this host with its files, at the latest as they were last collected."""
    root_url: str | None
    """The address of the endpoint as programs there see it; None is that of this host."""

    def agent_program(
        self,
        command: Sequence[str],
        access: EndpointAccess,
        task: Task,
        *,
        environment: Mapping[str, str],
        stdin: bytes,
        limit_s: float,
        start: Start = ChildProcess,
    ) -> AgentProgram:
        """Return a program that is an agent, and ends with all that it has started."""
        ...

    async def run_command(
        self, command: Sequence[str], *, environment: Mapping[str, str], stdin: bytes, limit_s: float
    ) -> Program:
        """Run another program in the workspace, and return it when it and what it has started are over."""
        ...

    async def write_files(self, files: Mapping[str, bytes], folder: str) -> None:
        """Write files below a folder of the place."""
        ...

    async def make_folder(self, name: str) -> str:
        """Make a new folder outside of the workspace, and return its path."""
        ...

    async def read_text(self, path: str) -> str:
        """Return a file as text.

        Raises:
            OSError: There is none.
        """
        ...

    async def collect(self, patterns: Sequence[str]) -> Collected:
        """Return what the workspace has now; a pattern that begins with `~/` is of the home folder."""
        ...

    async def is_full(self) -> bool:
        """Return whether the place has more bytes than it may have."""
        ...


class Source:
    """What workspaces are copied from: a folder, a tar archive or a git bundle; or one of these by task."""

    def __init__(self, path: str | None) -> None:
        """Name it.

        Raises:
            ConfigError: There is no such file or folder.
        """
        self._path = None if path is None else Path(path).absolute()
        if self._path is not None and not self._path.exists():
            raise ConfigError(
                f"rollout.agent_loop_args: workspace is {path!r}, which does not exist; expected a folder, a "
                "tar archive or a git bundle"
            )

    def of(self, task: Task) -> Path | None:
        """Return the source of a task: the one below the folder that `workspace` of its metadata names.

        Raises:
            AgentLoopError: It names none there.
        """
        name = task.metadata.get("workspace")
        if self._path is None or name is None:
            return self._path
        path = self._path / str(name)
        parts = PurePosixPath(str(name)).parts
        inside = ".." not in parts and path.resolve().is_relative_to(self._path.resolve())
        if not isinstance(name, str) or not parts or not inside or not path.exists():
            raise AgentLoopError(
                f"task {task.task_id} names the workspace {name!r:.200}; expected one below {self._path}"
            )
        return path


class LocalPlace:
    """A folder on this host, as `Place` describes it."""

    def __init__(self, root: Path, source: Path | None, max_bytes: int, inherit: Sequence[str]) -> None:
        """Describe a folder that `local_place` has filled."""
        self.root = root
        self._source = source
        self._max_bytes = max_bytes
        self._inherit = (*_INHERITED, *inherit)
        self._num_folders = 0
        self.workspace, self.home = str(root / "workspace"), str(root / "home")
        self.local_workspace = root / "workspace"
        self.root_url: str | None = None
        self._before = _signatures(self.local_workspace)

    def _environment(self, given: Mapping[str, str], home: str) -> dict[str, str]:
        kept = {name: os.environ[name] for name in self._inherit if name in os.environ}
        return {"PATH": os.defpath, **kept, **folder_variables(home, f"{self.root}/tmp"), **given}

    def agent_program(
        self,
        command: Sequence[str],
        access: EndpointAccess,
        task: Task,
        *,
        environment: Mapping[str, str],
        stdin: bytes,
        limit_s: float,
        start: Start = ChildProcess,
    ) -> AgentProgram:
        """Implements `Place.agent_program`."""
        return _LocalAgent(
            command,
            access,
            task,
            environment=self._environment(environment, self.home),
            stdin=stdin,
            cwd=self.workspace,
            limit_s=limit_s,
            start=start,
            place=self,
        )

    async def run_command(
        self, command: Sequence[str], *, environment: Mapping[str, str], stdin: bytes, limit_s: float
    ) -> Program:
        """Implements `Place.run_command`: with a home folder of its own, which no program has seen."""
        variables = self._environment(environment, await self.make_folder("home"))
        program = Program(command, variables, stdin=stdin, cwd=self.workspace, limit_s=limit_s)
        async with processes_ended(program.name):
            try:
                await program.run()
            except OSError as error:  # there is no such program
                raise AgentLoopError(f"{program.name!r} does not start: {error}") from error
        return program

    async def write_files(self, files: Mapping[str, bytes], folder: str) -> None:
        """Implements `Place.write_files`."""
        await run_to_end(partial(_write_files, files, Path(folder)))

    async def make_folder(self, name: str) -> str:
        """Implements `Place.make_folder`."""
        self._num_folders += 1
        folder = self.root / f"{name}-{self._num_folders}"
        folder.mkdir()
        return str(folder)

    async def read_text(self, path: str) -> str:
        """Implements `Place.read_text`."""
        return await asyncio.to_thread(Path(path).read_text, "utf-8", "replace")

    async def collect(self, patterns: Sequence[str]) -> Collected:
        """Implements `Place.collect`."""
        return await run_to_end(partial(self._collect, patterns))

    async def is_full(self) -> bool:
        """Implements `Place.is_full`."""
        return await asyncio.to_thread(_num_bytes, self.root) > self._max_bytes

    def _collect(self, patterns: Sequence[str]) -> Collected:
        workspace = Path(self.workspace)
        after = _signatures(workspace)
        names = sorted(name for name in {*self._before, *after} if self._before.get(name) != after.get(name))
        marks = {name: "+" if name not in self._before else "~" if name in after else "-" for name in names}
        files = dict[str, str]()
        for pattern in patterns:
            base, under = (Path(self.home), pattern[2:]) if pattern.startswith("~/") else (workspace, pattern)
            for path in sorted(base.glob(under))[:_MAX_NAMES]:
                if (data := _text_of(base, path, _MAX_COLLECTED_BYTES)) is not None:
                    files[str(path.relative_to(base))] = data
        is_folder = self._source is not None and self._source.is_dir()
        return Collected(
            changed=[f"{mark} {name}" for name, mark in marks.items()][:_MAX_NAMES],
            diff="".join(self._diff(name) for name in names[:_MAX_NAMES]) if is_folder else "",
            files=files,
        )

    def _diff(self, name: str) -> str:
        assert self._source is not None
        old = _text_of(self._source, self._source / name, _MAX_DIFFED_BYTES) or ""
        new = _text_of(Path(self.workspace), Path(self.workspace, name), _MAX_DIFFED_BYTES) or ""
        lines = difflib.unified_diff(old.splitlines(), new.splitlines(), name, name, lineterm="")
        return "".join(f"{line}\n" for line in lines)


class _LocalAgent(AgentProgram):
    """A program in a local place, which ends when the place is full."""

    def __init__(self, *given: Any, place: LocalPlace, **how: Any) -> None:
        super().__init__(*given, **how)
        self._place = place

    async def run(self) -> int:
        """Implements `Program.run`: what it has started has ended too, also in sessions of its own."""
        async with processes_ended(self.name), Nursery() as nursery:
            nursery.start_task("size of a workspace", self._end_when_full())
            try:
                return await super().run()
            finally:
                nursery.cancel_tasks()

    async def _end_when_full(self) -> None:
        while not await self._place.is_full():
            await sleep_idle(_MEASURED_S)
        self.end("size")


def folder_variables(home: str, tmp: str) -> dict[str, str]:
    """Return the variables that keep what a program writes for itself in folders of its attempt."""
    folders = {"CONFIG": ".config", "CACHE": ".cache", "DATA": ".local/share", "STATE": ".local/state"}
    xdg = {f"XDG_{name}_HOME": f"{home}/{path}" for name, path in folders.items()}
    return {"HOME": home, **xdg, "TMPDIR": tmp}


@asynccontextmanager
async def local_place(
    source: Path | None, *, max_bytes: int, inherit: Sequence[str] = ()
) -> AsyncIterator[LocalPlace]:
    """Make a place for the block, and remove it after the block, also if this process is killed in it.

    Raises:
        AgentLoopError: The source cannot be copied.
    """
    root = Path(tempfile.mkdtemp(prefix="async-rl-harness-"))
    # A program may have made folders that their owner cannot enter.
    remove = ["sh", "-c", 'chmod -R u+rwX "$1"; exec rm -rf "$1"', "sh", str(root)]
    async with ReleasedBy(remove):
        try:
            await run_to_end(partial(_fill, root, source, max_bytes))
            yield await run_to_end(partial(LocalPlace, root, source, max_bytes, inherit))
        finally:
            await run_to_end(partial(_remove, root))


def _fill(root: Path, source: Path | None, max_bytes: int) -> None:
    workspace = root / "workspace"
    for name in ("home", "tmp"):
        (root / name).mkdir()
    try:
        if source is None:
            workspace.mkdir()
        elif source.is_dir():
            if (size := _num_bytes(source)) > max_bytes:
                raise OSError(f"it has {size} bytes, and max_workspace_mb is {max_bytes >> 20}")
            shutil.copytree(source, workspace, symlinks=True)
        elif source.suffix == ".bundle":
            subprocess.run(
                ["git", "clone", "--quiet", str(source), str(workspace)], check=True, stderr=subprocess.PIPE
            )
        else:
            with tarfile.open(source) as archive:
                archive.extractall(workspace, **UNPACKED)
    except (OSError, tarfile.TarError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or str(error).encode()
        raise AgentLoopError(
            f"the workspace {source} cannot be copied: {said.decode(errors='replace')[-500:]}"
        ) from error


def _remove(root: Path) -> None:
    def retry(remove: Any, path: str, error: Any) -> None:
        """Open what its owner cannot enter or change, and try again."""
        with suppress(OSError):
            os.chmod(os.path.dirname(path), stat.S_IRWXU)
            os.chmod(path, stat.S_IRWXU, follow_symlinks=False)
        with suppress(OSError):
            shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)

    shutil.rmtree(root, onerror=retry)


def _files_below(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Yield all files and links below a folder, but for what cannot be read."""
    left = [str(folder)]
    while left:
        with suppress(OSError), os.scandir(left.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    left.append(entry.path)
                else:
                    yield entry


def _num_bytes(folder: Path) -> int:
    size = 0
    for entry in _files_below(folder):
        with suppress(OSError):  # it has been removed meanwhile
            size += entry.stat(follow_symlinks=False).st_blocks * 512
    return size


def _signatures(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Return what changes with a file, for each file of a workspace; git's own files are not of interest."""
    found = {}
    for entry in _files_below(folder):
        name = os.path.relpath(entry.path, folder)
        if not name.startswith(".git/"):
            with suppress(OSError):
                facts = entry.stat(follow_symlinks=False)
                found[name] = facts.st_mtime_ns, facts.st_size, facts.st_mode
    return found


def _text_of(base: Path, path: Path, limit: int) -> str | None:
    """Return the beginning of a text file inside a folder; None for other files and links that lead out."""
    try:
        if not path.resolve().is_relative_to(base.resolve()):
            return None
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe would block
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return None
            data = file.read(limit)
    except OSError:
        return None
    return None if b"\0" in data else data.decode(errors="replace")


def _write_files(files: Mapping[str, bytes], folder: Path) -> None:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
