"""A place in a sandbox, with the workspace, the program and what scores it; the source and a copy are here.

```
 source ──► copy here ──tar──► sandbox: workspace ─► setup ─► program ─► score
                ▲                          │            ▲ 127.0.0.1, served by this process
                └──────────tar─────────────┘ collected: changes, files, what a function scores
```

A policy may have written each byte of what comes back. So nothing of it is created here but folders and plain
files below the copy.
"""

from __future__ import annotations

import asyncio
import copy
import os
import secrets
import shlex
import shutil
import tarfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Final

from agent_loops.agent_program import AgentProgram, ChildProcess, Program, Start
from agent_loops.harness.place import Collected, LocalPlace, folder_variables, local_place
from agent_loops.sandboxes.protocol import MAX_FILE_BYTES, ShellSandbox
from async_rl.errors import AgentLoopError
from async_rl.openai_api.endpoint import Endpoint, EndpointAccess
from async_rl.runtime.serving_clock import serving_timeout
from async_rl.runtime.supervision import Nursery, first_error
from async_rl.runtime.threads import run_to_end
from async_rl.runtime.waits import sleep_idle
from async_rl.types import Task

ROOT: Final = "/tmp/async-rl"
"""Where all of an attempt is in its sandbox. It is the same in each, so that programs which tell the policy
their folder send the same requests after a restart."""
_WORKSPACE: Final = f"{ROOT}/workspace"
MAX_OUTPUT_BYTES: Final = 1 << 20
"""How much is kept of each output of a program."""
_MEASURED_S: Final = 30.0
"""Time between two measurements of a place while its program runs; each is a command in the sandbox."""
_AGAIN_S: Final = 1.0
"""Time for a program to be over that was ended; a limit may come before its start in the sandbox."""
_FILES_S: Final = 300.0
"""The time limit of commands that pack, unpack and measure files."""
_WITHOUT_GIT: Final = (
    "set -- /dev/null; for each in ./* ./.[!.]* ./..?*; do "
    '[ "$each" = ./.git ] || [ ! -e "$each" ] || set -- "$@" "$each"; done'
)
"""Names what is in a folder but for git's own files, which may be most of it. The first name, of what is not
copied, is for archives that would be empty."""
_SIGNALS: Final = range(129, 193)
"""The exit codes of shells for a program that a signal has ended."""


class SandboxPlace:
    """A folder in a sandbox, as `Place` describes it."""

    def __init__(
        self,
        box: ShellSandbox,
        here: LocalPlace,
        *,
        workspace: str,
        max_bytes: int,
        inherit: Sequence[str],
        limit_s: float,
        root_url: str | None,
    ) -> None:
        """Describe a folder that `sandbox_place` has filled.

        Args:
            box: The sandbox.
            here: A folder of this host with the same files.
            workspace: The folder in the sandbox.
            max_bytes: How large it may become.
            inherit: Names of our variables that programs receive.
            limit_s: The time limit of a program that has none of its own.
            root_url: The address of the endpoint inside.
        """
        self.box, self.limit_s, self.root_url = box, limit_s, root_url
        self._here, self._max_bytes, self._inherit = here, max_bytes, inherit
        self.workspace, self.home = workspace, f"{ROOT}/home"
        self.local_workspace = here.local_workspace

    def _environment(self, given: Mapping[str, str], home: str) -> dict[str, str]:
        kept = {name: os.environ[name] for name in self._inherit if name in os.environ}
        return {**kept, **folder_variables(home, f"{ROOT}/tmp"), **given}

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
        """Implements `Place.agent_program`; programs here are started by the sandbox, not by `start`."""
        variables = self._environment(environment, self.home)
        how = {"environment": variables, "stdin": stdin, "cwd": self.workspace, "limit_s": limit_s}
        return _SandboxAgent(command, access, task, place=self, **how)

    async def run_command(
        self, command: Sequence[str], *, environment: Mapping[str, str], stdin: bytes, limit_s: float
    ) -> Program:
        """Implements `Place.run_command`: with a home folder of its own, which no program has seen."""
        variables = self._environment(environment, await self.make_folder("home"))
        how = {"stdin": stdin, "cwd": self.workspace, "limit_s": limit_s}
        program = _SandboxProgram(command, variables, place=self, **how)
        await program.run()
        return program

    async def write_files(self, files: Mapping[str, bytes], folder: str) -> None:
        """Implements `Place.write_files`."""
        paths = {f"{folder}/{name}": data for name, data in files.items()}
        await _run(self.box, shlex.join(["mkdir", "-p", *{os.path.dirname(path) for path in paths}]))
        for path, data in paths.items():
            await self._write(path, data)

    async def make_folder(self, name: str) -> str:
        """Implements `Place.make_folder`, by a name that no program could know before."""
        folder = f"{ROOT}/{name}-{secrets.token_hex(8)}"
        await _run(self.box, f"mkdir {folder}")
        return folder

    async def read_text(self, path: str) -> str:
        """Implements `Place.read_text`."""
        return (await self.box.read_file(path)).decode(errors="replace")

    async def collect(self, patterns: Sequence[str]) -> Collected:
        """Implements `Place.collect`: a place that is full is not copied."""
        if await self.is_full():
            return Collected(changed=[], diff="", files={})
        await _copy_out(self.box, self.workspace, self.local_workspace, self._max_bytes)
        if any(pattern.startswith("~/") for pattern in patterns):
            await _copy_out(self.box, self.home, Path(self._here.home), self._max_bytes)
        return await self._here.collect(patterns)

    async def is_full(self) -> bool:
        """Implements `Place.is_full`."""
        inside = "" if self.workspace == _WORKSPACE else shlex.quote(f"{self.workspace}/.")
        used = await _run(self.box, f"du -sk {ROOT} {inside} 2>/dev/null || echo 0")
        return sum(int(line.split()[0]) for line in used.splitlines()) << 10 > self._max_bytes

    async def moved_to(self, box: ShellSandbox) -> SandboxPlace:
        """Return a place in another sandbox, with the workspace as it was collected and nothing else."""
        archive = self._here.root / "moved.tar"
        await run_to_end(partial(_pack_again, self.local_workspace, archive))
        place = copy.copy(self)
        place.box = box
        await _run(box, f"mkdir -p {ROOT}/tmp")
        await place.write_workspace(archive)
        return place

    async def write_workspace(self, archive: Path) -> None:
        """Unpack an archive in place of the workspace in the sandbox."""
        names = list[str]()
        while data := await asyncio.to_thread(_read_part, archive, len(names)):
            names.append(f"{ROOT}/part-{len(names)}")
            await self._write(names[-1], data)
        folder, joined = shlex.quote(self.workspace), " ".join(names)
        emptied = f"mkdir -p {folder} && cd {folder} && rm -rf ./* ./.[!.]* ./..?*"
        await _run(self.box, f"{emptied} && cat {joined} | tar -xpf - && rm -f {joined}")

    async def _write(self, path: str, data: bytes) -> None:
        try:
            await self.box.write_file(path, data)
        except OSError as error:
            raise AgentLoopError(f"{path} cannot be written in the sandbox: {error}") from error


async def _run(box: ShellSandbox, command: str) -> str:
    """Return the output of a command of ours.

    Raises:
        AgentLoopError: It fails: the image lacks a program, or the sandbox has no space left.
    """
    result = await box.exec(command, timeout_s=_FILES_S)
    if result.exit_code or result.timed_out:
        raise AgentLoopError(
            f"`{command[:80]}` failed in the sandbox with {result.exit_code}: {result.stderr[-300:]}"
        )
    return result.stdout


async def _copy_out(
    box: ShellSandbox, folder: str, target: Path, max_bytes: int, *, with_git: bool = True
) -> None:
    """Replace a folder of this host by one of the sandbox, whose archive stays beside it.

    Args:
        box: The sandbox.
        folder: Its folder.
        target: The folder of this host.
        max_bytes: The most bytes of the files.
        with_git: Whether git's own files are copied too.

    Raises:
        AgentLoopError: It does not exist, or has more bytes.
    """
    archive, inside, part = target.with_suffix(".tar"), f"{ROOT}/archive", f"{ROOT}/part"
    chosen = "set -- ." if with_git else _WITHOUT_GIT
    # What cannot be read is left out: a program may have locked it.
    packs = f'cd {shlex.quote(folder)} && {{ {chosen}; tar -cf {inside} "$@"; wc -c <{inside}; }}'
    packed = int(await _run(box, packs))
    if packed > 2 * max_bytes:  # files with holes may be larger than the space that they take
        raise AgentLoopError(
            f"{folder} has {packed} bytes in its sandbox; max_workspace_mb is too small for it"
        )
    await asyncio.to_thread(archive.write_bytes, b"")
    for number in range(-(-packed // MAX_FILE_BYTES)):
        await _run(box, f"dd if={inside} of={part} bs={MAX_FILE_BYTES} count=1 skip={number}")
        await asyncio.to_thread(_append, archive, await box.read_file(part))
    await _run(box, f"rm -f {inside} {part}")
    await run_to_end(partial(_unpack, archive, target, max_bytes))


class _SandboxProgram(Program):
    """A program in a sandbox: at its end, all that it has started is ended too."""

    _is_measured: ClassVar[bool] = False
    """Whether it is ended when the place is full."""

    def __init__(self, *given: Any, place: SandboxPlace, **how: Any) -> None:
        super().__init__(*given, **how)
        self._place = place

    async def run(self) -> int:
        """Implements `Program.run`."""
        box = self._place.box
        words = [f"export {name}={shlex.quote(value)}" for name, value in self._environment.items()]
        words += [f"cd {shlex.quote(str(self._cwd))} || exit 126", f"exec {shlex.join(self._command)}"]
        work = box.exec("\n".join(words), timeout_s=self._place.limit_s, stdin=self._stdin)
        try:
            async with Nursery() as nursery:
                running = nursery.start_task(f"program {self.name}", work)
                size = nursery.start_task("size of a workspace", self._end_when_full())
                try:
                    async with serving_timeout(self._limit_s or self._place.limit_s):
                        await asyncio.wait([running])
                except TimeoutError:
                    self.ended_by = "time"
                size.cancel()  # else it would miss the command that measures
                await box.end_processes()
                while not (await asyncio.wait([running], timeout=_AGAIN_S))[0]:
                    await box.end_processes()  # it had not begun yet
                result = running.result()
        except ExceptionGroup as errors:
            raise first_error(errors) from errors
        self._stdout.add(result.stdout.encode())
        self._stderr.add(result.stderr.encode())
        if result.truncated:
            self._stdout.add(b"\n[more output was cut]\n")
        if result.timed_out:
            self.ended_by = self.ended_by or "time"
        if self.ended_by:
            return 0
        code = result.exit_code
        self.exit_code = code = 128 - code if code in _SIGNALS else code
        return code

    async def _end_when_full(self) -> None:
        while not (self._is_measured and await self._place.is_full()):
            await sleep_idle(_MEASURED_S)
        self.ended_by = self.ended_by or "size"
        await self._place.box.end_processes()


class _SandboxAgent(_SandboxProgram, AgentProgram):
    """An agent in a sandbox."""

    _is_measured = True


@asynccontextmanager
async def sandbox_place(
    box: ShellSandbox,
    source: Path | None,
    endpoint: Endpoint,
    *,
    inside: str = "",
    max_bytes: int,
    limit_s: float,
    inherit: Sequence[str] = (),
) -> AsyncIterator[SandboxPlace]:
    """Make a place in a sandbox for the block, which reaches the endpoint while that is served.

    Args:
        box: The sandbox.
        source: What the workspace is copied from; None is an empty one.
        endpoint: The endpoint.
        inside: A folder of the image that is the workspace, instead of a copy.
        max_bytes: How large the place may become.
        limit_s: The time limit of a program that has none of its own.
        inherit: Names of our variables that programs receive.

    Raises:
        AgentLoopError: The source cannot be copied, or the image has no such folder.
        SandboxLost: The sandbox is gone, or nothing can listen in it.
    """
    async with AsyncExitStack() as stack:
        local = await stack.enter_async_context(local_place(source, max_bytes=max_bytes))
        workspace, archive = local.local_workspace, local.root / "source.tar"
        await _run(box, f"mkdir -p {ROOT}/home {ROOT}/tmp")
        if inside:
            await _copy_out(box, inside, workspace, max_bytes, with_git=False)
            source = local.root / "source"
        else:
            await run_to_end(partial(_pack, workspace, archive))
            await run_to_end(partial(_unpack, archive, workspace, max_bytes))
        here = await run_to_end(partial(LocalPlace, local.root, source, max_bytes, ()))
        root_url = None
        if (listener := await box.listen()) is not None:
            stack.callback(listener.close)
            root_url = await stack.enter_async_context(endpoint.serving_at(listener))
        place = SandboxPlace(
            box,
            here,
            workspace=inside or _WORKSPACE,
            max_bytes=max_bytes,
            inherit=inherit,
            limit_s=limit_s,
            root_url=root_url,
        )
        if inside:
            workspace.rename(local.root / "source")
            if await place.is_full():
                raise AgentLoopError(
                    f"{inside} of the image has more than {max_bytes} bytes: max_workspace_mb"
                )
        else:
            await place.write_workspace(archive)
        yield place


def _pack(folder: Path, archive: Path) -> None:
    """Pack a folder as images of all kinds unpack it, with times that survive both ways."""

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        member.mtime = int(member.mtime)
        return member

    with tarfile.open(archive, "w", format=tarfile.GNU_FORMAT) as writer:
        for path in sorted(folder.iterdir()):  # without the folder, which may belong to another user there
            writer.add(path, path.name, filter=plain)


def _pack_again(folder: Path, archive: Path) -> None:
    """Pack a folder that was copied from a sandbox, with the symbolic links that only its archive has.

    A policy has chosen them. They come last and lie in folders, so that nothing is unpacked through them.
    """
    _pack(folder, archive)
    with (
        tarfile.open(folder.with_suffix(".tar"), "r:") as reader,
        tarfile.open(archive, "a:", format=tarfile.GNU_FORMAT) as writer,
    ):
        for member in reader:
            path = folder / member.name
            if member.issym() and path.parent.is_dir() and not path.exists():
                link = tarfile.TarInfo(member.name)
                link.type, link.linkname = tarfile.SYMTYPE, member.linkname
                writer.addfile(link)


def _unpack(archive: Path, folder: Path, max_bytes: int) -> None:
    """Replace what is in a folder by the folders and plain files of an archive.

    Raises:
        AgentLoopError: The archive is broken, or has names outside of the folder.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(exist_ok=True)
    left = max_bytes
    try:
        with tarfile.open(archive, "r:") as reader:
            for member in reader:
                path = _below(folder, member.name)
                if (left := left - member.size) < 0:
                    raise OSError(f"it has more than {max_bytes} bytes")
                if member.isdir():
                    path.mkdir(parents=True, exist_ok=True)
                elif member.islnk() and (first := _below(folder, member.linkname)).is_file():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    os.link(first, path)  # another name of a file of the copy
                elif member.isreg() and (content := reader.extractfile(member)) is not None:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with content, open(path, "wb") as file:
                        shutil.copyfileobj(content, file)
                    os.chmod(path, 0o600 | member.mode & 0o777)
                    os.utime(path, (int(member.mtime), int(member.mtime)))
    except (OSError, ValueError, tarfile.TarError) as error:
        raise AgentLoopError(f"the workspace cannot be copied from its sandbox: {error}") from error


def _below(folder: Path, name: str) -> Path:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise OSError(f"it has the name {name[:200]!r}")
    return folder / path


def _read_part(archive: Path, number: int) -> bytes:
    with open(archive, "rb") as file:
        file.seek(number * MAX_FILE_BYTES)
        return file.read(MAX_FILE_BYTES)


def _append(archive: Path, data: bytes) -> None:
    with open(archive, "ab") as file:
        file.write(data)
