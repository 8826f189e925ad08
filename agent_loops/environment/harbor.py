r"""Task folders of Harbor: a shell in which the policy works, and a test script that writes the reward.

```
 task.toml        time limits, variables           reset: environment/ is set up as its Dockerfile says
 instruction.md   what the policy reads            step:  the last ```bash block of a turn is run
 environment/     Dockerfile, files                end:   tests/ are copied to /tests, /tests/test.sh is run
 tests/           test.sh                                 /logs/verifier/reward.json or reward.txt is read
```

**Source**: `harbor/models/task/config.py`, `models/task/paths.py`, `models/trial/paths.py` and
`verifier/verifier.py` of Harbor 0.26 (PyPI: harbor). The package itself is not needed.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import re
import shlex
import tarfile
import tomllib
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Final

import msgspec

from agent_loops.environment.base import Environment, Observation
from agent_loops.sandboxes import ExecResult, Sandboxes, ShellSandbox
from async_rl.errors import AgentLoopError, ConfigError, EnvironmentNotReady, NotScored, ToolError
from async_rl.runtime.reward_values import reward_value
from async_rl.types import Task

_TESTS: Final = "/tests"
_LOGS: Final = "/logs/verifier"
_REWARD_FILES: Final = (f"{_LOGS}/reward.json", f"{_LOGS}/reward.txt")
_MAX_OUTPUT_BYTES: Final = 1 << 20
"""How much is kept of the output of a command."""
_FILES_S: Final = 60.0
"""The time limit of our own commands, which only touch a few files."""
_BLOCK: Final = re.compile(r"```(?:bash|sh|shell)[ \t]*\n(.*?)```", re.DOTALL)
_VARIABLE: Final = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_IGNORED: Final = ("CMD", "ENTRYPOINT", "EXPOSE", "LABEL", "SHELL", "STOPSIGNAL")
"""Instructions of a Dockerfile that change no file that a command sees."""


class _EnvironmentSection(msgspec.Struct, frozen=True):
    docker_image: str | None = None
    os: str = "linux"
    gpus: int | None = None
    memory_mb: int | None = None
    workdir: str | None = None
    env: dict[str, str] = {}


class _AgentSection(msgspec.Struct, frozen=True):
    timeout_sec: float | None = None


class _VerifierSection(msgspec.Struct, frozen=True):
    timeout_sec: float = 600.0
    env: dict[str, str] = {}
    environment_mode: str | None = None
    environment: dict[str, Any] | None = None


class HarborTask(msgspec.Struct, frozen=True):
    """What is used of a `task.toml`; other keys are ignored."""

    environment: _EnvironmentSection = _EnvironmentSection()
    agent: _AgentSection = _AgentSection()
    verifier: _VerifierSection = _VerifierSection()
    steps: list[Any] | None = None

    @classmethod
    def read(cls, folder: Path) -> HarborTask:
        """Read the `task.toml` of a folder.

        Raises:
            AgentLoopError: There is none, or it is not of Harbor's format, or the task has several steps.
        """
        try:
            task = msgspec.convert(tomllib.loads((folder / "task.toml").read_text(encoding="utf-8")), cls)
        except (OSError, ValueError, msgspec.ValidationError) as error:
            raise AgentLoopError(f"harbor task {folder}: task.toml cannot be read: {error}") from error
        if task.steps:
            raise AgentLoopError(f"harbor task {folder} has steps; expected a task with one instruction.md")
        return task


class Image(msgspec.Struct, frozen=True):
    """What the environment of a task starts from, and what is put on top of it."""

    name: str = ""
    """An image of the backend; empty is its own."""
    is_built: bool = False
    """Whether the backend has to build it of `environment/`."""
    workdir: str = ""
    """The absolute path of the working folder; empty is the image's."""
    env: dict[str, str] = {}
    copies: tuple[tuple[str, str], ...] = ()
    """Pairs of a path below `environment/` and its absolute target."""


class HarborEnvironment(Environment):
    """One attempt at a task folder of Harbor, the task's `folder`.

    The policy reads the instruction. The last ```bash block of a turn is run, and what it prints is the next
    observation. A turn without a block ends the attempt, and so does `agent.timeout_sec`. Then, and when the
    policy has used up its budget, the tests give the reward; where they give several, the others are
    recorded beside `reward`.

    Args:
        sandbox: Where commands run: the arguments of `agent_loops.sandboxes.Sandboxes`. The default is local:
            a task is refused there if its Dockerfile does more than copy files and set variables.
        keep_processes: Whether what the policy has started runs on while the tests run, for tasks whose tests
            look for it. It may forge the reward.
        max_output_chars: The most characters of a command's output that the policy reads.
    """

    bounds_steps: ClassVar[bool] = True

    def __init__(
        self,
        sandbox: Mapping[str, Any] | None = None,
        keep_processes: bool = False,
        max_output_chars: int = 8192,
    ) -> None:
        if max_output_chars < 1:
            raise ConfigError(f"rollout.agent_loop_args: max_output_chars is {max_output_chars}")
        self._sandbox = sandbox or {}
        self._keep_processes = keep_processes
        self._max_output_chars = max_output_chars
        self._stack = AsyncExitStack()

    def make_shared(self) -> Sandboxes:
        """Implements `Environment.make_shared`.

        Raises:
            ConfigError: There is no such argument or backend.
            EnvironmentNotReady: This machine does not allow the isolation of local sandboxes.
        """
        try:
            return Sandboxes(**{"max_output_bytes": _MAX_OUTPUT_BYTES, **self._sandbox})
        except TypeError as error:
            raise ConfigError(f"rollout.agent_loop_args: sandbox: {error}") from error

    async def reset(self, task: Task) -> Observation:
        """Implements `Environment.reset`."""
        folder = task.metadata.get("folder")
        if not isinstance(folder, str):
            raise AgentLoopError(f"task {task.task_id} has no folder; expected the path of a Harbor task")
        self._folder, sandboxes = Path(folder), self.shared
        self._task = await asyncio.to_thread(HarborTask.read, self._folder)
        kinds = {"has_images": sandboxes.has_images, "builds_images": sandboxes.builds_images}
        self._image = image = await asyncio.to_thread(read_image, self._folder, self._task, **kinds)
        instruction = await asyncio.to_thread((self._folder / "instruction.md").read_text, "utf-8")
        source = self._folder / "environment"
        if image.is_built:
            await sandboxes.build_image(image.name, await asyncio.to_thread(packed, [(source, "/")]))
        self._box: ShellSandbox = await self._stack.enter_async_context(sandboxes.open(image=image.name))
        await self._unpack([(source / path, target) for path, target in image.copies])
        self._begun_s = asyncio.get_running_loop().time()
        return Observation(text=instruction.strip())

    async def step(self, action: str) -> Observation:
        """Implements `Environment.step`."""
        blocks = _BLOCK.findall(action.rpartition("</think>")[2])
        if not blocks:
            return await self._scored(terminated=True)
        limit_s = self._task.agent.timeout_sec
        if limit_s is not None and asyncio.get_running_loop().time() - self._begun_s > limit_s:
            return await self._scored(truncated=True)
        try:
            result = await self._run(blocks[-1], self._task.environment.env, self.timeout_s)
        except ToolError as error:  # it is too long
            return Observation(text=str(error), is_invalid=True)
        return Observation(text=self._told(result))

    async def finish(self) -> Observation:
        """Implements `Environment.finish`: the tests score what there is."""
        return await self._scored()

    async def close(self) -> None:
        """Implements `Environment.close`."""
        await self._stack.aclose()

    async def _run(self, command: str, env: Mapping[str, str], limit_s: float) -> ExecResult:
        """Run a command by bash, where there is one, in the working folder; both outputs are one."""
        variables = self._image.env | {name: resolved(value) for name, value in env.items()}
        lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
        if self._image.workdir:
            folder = shlex.quote(self._image.workdir)
            lines.append(f"mkdir -p {folder} && cd {folder} || exit")
        lines.append(f'exec "$(command -v bash || echo sh)" -c {shlex.quote(command)} 2>&1')
        return await self._box.exec("\n".join(lines), timeout_s=limit_s)

    async def _unpack(self, places: list[tuple[Path, str]]) -> None:
        archive = await asyncio.to_thread(packed, places)
        result = await self._box.exec("tar -xpof - -C /", timeout_s=_FILES_S, stdin=archive)
        if result.exit_code:
            raise AgentLoopError(f"files cannot be unpacked: {result.stderr[-300:]}")

    def _told(self, result: ExecResult) -> str:
        output = result.stdout
        if (excess := len(output) - self._max_output_chars) > 0:
            half = self._max_output_chars // 2
            output = f"{output[:half]}\n… {excess} characters …\n{output[-half:]}"
        end = f"exit code {result.exit_code}"
        if result.timed_out:
            end = f"the command ran past {self.timeout_s:g} s and was ended"
        return f"{output.rstrip()}\n[{end}]".lstrip()

    async def _scored(self, *, terminated: bool = False, truncated: bool = False) -> Observation:
        """Run the tests, and read the reward that they write.

        Raises:
            NotScored: They write none: a fault of the task or the sandbox, and no reward of 0.
        """
        if not self._keep_processes:
            with suppress(NotImplementedError):  # at services
                await self._box.end_processes()
        await self._run(f"rm -rf {_TESTS} {' '.join(_REWARD_FILES)}; mkdir -p {_LOGS}", {}, _FILES_S)
        await self._unpack([(self._folder / "tests", _TESTS)])
        verifier = self._task.verifier
        command = f"chmod +x {_TESTS}/test.sh && {_TESTS}/test.sh > {_LOGS}/test-stdout.txt 2>&1"
        ran = await self._run(command, self._task.environment.env | verifier.env, verifier.timeout_sec)
        for path in _REWARD_FILES:
            with suppress(OSError):
                parts = read_rewards(await self._box.read_file(path), path)
                reward = parts.pop("reward")
                return Observation(reward=reward, parts=parts, terminated=terminated, truncated=truncated)
        log = await self._run(f"tail -c 500 {_LOGS}/test-stdout.txt", {}, _FILES_S)
        how = "ran past verifier.timeout_sec" if ran.timed_out else f"ended with {ran.exit_code}"
        raise NotScored(
            f"harbor task {self._folder}: tests/test.sh {how} and wrote neither "
            f"{' nor '.join(_REWARD_FILES)}; its output ends: {log.stdout.strip()}"
        )


class _NeedsImage(Exception):
    """A task needs an image; the message says why."""


def read_image(
    folder: Path, task: HarborTask, *, has_images: bool = False, builds_images: bool = False
) -> Image:
    """Return what the environment of a task starts from.

    Args:
        folder: The task's folder.
        task: Its `task.toml`.
        has_images: Whether sandboxes start from images; else they have the programs of this host.
        builds_images: Whether their backend builds images.

    Raises:
        EnvironmentNotReady: The backend has no such environment.
    """
    environment, source = task.environment, folder / "environment"
    is_separate = task.verifier.environment is not None or task.verifier.environment_mode == "separate"
    has_file = (source / "Dockerfile").is_file()
    for is_there, why in (
        (environment.os != "linux", f"its system is {environment.os}"),
        (bool(environment.gpus), "it asks for GPUs"),
        (any(source.glob("*compose.y*ml")), "it has a compose file"),
        (is_separate, "its verifier has an environment of its own"),
        (environment.docker_image is None and not has_file, "it has neither an image nor a Dockerfile"),
    ):
        if is_there:
            raise EnvironmentNotReady(f"harbor task {folder} cannot be run: {why}. Leave the task out")
    try:
        if environment.docker_image is None:
            image = _read_dockerfile(source, has_images=has_images)
        elif has_images:
            image = Image(name=environment.docker_image)
        else:
            raise _NeedsImage(f"its image is {environment.docker_image}")
    except _NeedsImage as why:
        if not builds_images:
            raise EnvironmentNotReady(
                f"harbor task {folder} needs a container engine: {why}. Name one in rollout.agent_loop_args, "
                "`sandbox: {backend: {kind: containers}}`, or leave the task out"
            ) from None
        image = Image(name=f"async-rl-harbor:{_digest(source)}", is_built=True)
    return msgspec.structs.replace(image, workdir=environment.workdir or image.workdir)


def _read_dockerfile(source: Path, *, has_images: bool) -> Image:
    """Return what a Dockerfile sets up if it only copies files and sets variables.

    Raises:
        _NeedsImage: It does more.
    """
    base, workdir, env, copies = "", "" if has_images else "/", dict[str, str](), list[tuple[str, str]]()
    text = re.sub(r"\\\n", " ", (source / "Dockerfile").read_text(encoding="utf-8"))
    for line in filter(None, map(str.strip, text.splitlines())):
        name, _, rest = line.partition(" ")
        name, words = name.upper(), list[str]()
        if line.startswith("#") or name in _IGNORED:
            continue
        if name in ("FROM", "WORKDIR", "ENV", "COPY") and not re.search(r"[\[$]|^--", rest):
            words = shlex.split(rest)
        if name == "FROM" and words and not base:
            base = words[0]
        elif name == "WORKDIR" and words:
            workdir = str(PurePosixPath(workdir, words[0]))
        elif name == "ENV" and words and all("=" in word for word in words):
            env |= dict(word.split("=", 1) for word in words)
        elif name == "COPY" and len(words) == 2:
            target = PurePosixPath(workdir, words[1])
            if words[1].endswith(("/", ".")) and not (source / words[0]).is_dir():
                target /= PurePosixPath(words[0]).name
            copies.append((words[0], str(target)))
        else:
            raise _NeedsImage(f"its Dockerfile has `{line[:80]}`")
    for path, _ in copies:
        if not (source / path).resolve().is_relative_to(source.resolve()) or not (source / path).exists():
            raise _NeedsImage(f"its Dockerfile copies {path!r}, which is not in {source}")
    if any(not path.startswith("/") for path in (workdir, *(target for _, target in copies)) if path):
        raise _NeedsImage("its Dockerfile has paths that are relative to the WORKDIR of its image")
    return Image(name=base if has_images else "", workdir=workdir, env=env, copies=tuple(copies))


def _digest(source: Path) -> str:
    """Return a name for the content of a folder."""
    digest = hashlib.sha256()
    for path in sorted(source.rglob("*")):
        content = path.read_bytes() if path.is_file() else b""
        facts = (str(path.relative_to(source)), path.lstat().st_mode, len(content))
        digest.update(repr(facts).encode() + content)
    return digest.hexdigest()[:16]


def packed(places: list[tuple[Path, str]]) -> bytes:
    """Return files, and what is in folders, as a tar archive at their absolute targets, owned by root."""

    def owned(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for source, target in places:
            # Without the folder itself, whose mode there stays as it is.
            for path in sorted(source.iterdir()) if source.is_dir() else [source]:
                name = PurePosixPath(target, path.relative_to(source))
                archive.add(path, arcname=str(name).lstrip("/"), filter=owned)
    return buffer.getvalue()


def read_rewards(content: bytes, path: str) -> dict[str, float]:
    """Return the rewards of a reward file, among them `reward`: that of the name, or the only one.

    Raises:
        NotScored: The file holds something else than finite numbers, or several without a `reward`.

    Example:
        >>> read_rewards(b"1", "reward.txt")
        {'reward': 1.0}
        >>> read_rewards(b'{"passed": 0.5}', "reward.json")
        {'passed': 0.5, 'reward': 0.5}
    """
    try:
        given = json.loads(content) if path.endswith(".json") else float(content)
        rewards = given if isinstance(given, dict) else {"reward": given}
    except ValueError as error:
        raise NotScored(f"{path} has {content[:100]!r}; expected a number or a JSON object") from error
    values = {name: reward_value(value) for name, value in rewards.items()}
    known = {name: value for name, value in values.items() if value is not None}
    if len(known) < len(values) or ("reward" not in known and len(known) != 1):
        raise NotScored(
            f"{path} has {given!r:.200}; expected finite numbers, of which one is called reward or alone"
        )
    return {**known, "reward": known.get("reward", next(iter(known.values())))}


def resolved(value: str) -> str:
    """Return the value of a variable in `task.toml`, with `${NAME}` and `${NAME:-default}` of this process.

    Raises:
        EnvironmentNotReady: A variable without a default is not set.
    """

    def found(match: re.Match[str]) -> str:
        name, default = match[1], match[2]
        if name not in os.environ and default is None:
            raise EnvironmentNotReady(f"task.toml refers to the variable {name}, which is not set")
        return os.environ.get(name, default or "")

    return _VARIABLE.sub(found, value)
