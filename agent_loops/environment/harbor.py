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
import io
import json
import os
import re
import shlex
import tarfile
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Final

import msgspec

from agent_loops.environment.base import Environment, Observation
from agent_loops.environment.local_shell import CommandResult, LocalShell, TaskShell
from async_rl.errors import AgentLoopError, ConfigError, EnvironmentNotReady
from async_rl.runtime.loading import load_object
from async_rl.runtime.reward_values import reward_value
from async_rl.types import Task

_TESTS: Final = "/tests"
_LOGS: Final = "/logs/verifier"
_REWARD_FILES: Final = (f"{_LOGS}/reward.json", f"{_LOGS}/reward.txt")
_MAX_REWARD_BYTES: Final = 1 << 16
_FILES_S: Final = 60.0
"""The time limit of our own commands, which only touch a few files."""
_BLOCK: Final = re.compile(r"```(?:bash|sh|shell)[ \t]*\n(.*?)```", re.DOTALL)
_VARIABLE: Final = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_IGNORED: Final = ("CMD", "ENTRYPOINT", "EXPOSE", "LABEL", "FROM", "SHELL", "STOPSIGNAL")
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
    """What a Dockerfile sets up, as far as it only copies files."""

    workdir: str = "/"
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
        sandbox: `module:Class` of a `TaskShell`, made with the task folder, its `HarborTask` and `Image`. The
            default runs commands on this host, isolated from its files and network, and refuses a task
            whose Dockerfile does more than copy files and set variables.
        max_output_chars: The most characters of a command's output that the policy reads.
    """

    bounds_steps: ClassVar[bool] = True

    def __init__(
        self, sandbox: str = "agent_loops.environment.harbor:host_shell", max_output_chars: int = 8192
    ) -> None:
        self._new_shell: Callable[[Path, HarborTask, Image], TaskShell] = load_object(sandbox, what="sandbox")
        self._is_local = self._new_shell is host_shell
        if max_output_chars < 1:
            raise ConfigError(f"rollout.agent_loop_args: max_output_chars is {max_output_chars}")
        self._max_output_chars = max_output_chars
        self._shell: TaskShell | None = None

    async def reset(self, task: Task) -> Observation:
        """Implements `Environment.reset`."""
        folder = task.metadata.get("folder")
        if not isinstance(folder, str):
            raise AgentLoopError(f"task {task.task_id} has no folder; expected the path of a Harbor task")
        self._folder = Path(folder)
        self._task, self._image, instruction, files = await asyncio.to_thread(self._read_folder)
        self._shell = self._new_shell(self._folder, self._task, self._image)
        await self._shell.start()
        if self._is_local:
            await self._shell.unpack(files, "/")
        self._begun_s = asyncio.get_running_loop().time()
        return Observation(text=instruction)

    def _read_folder(self) -> tuple[HarborTask, Image, str, bytes]:
        task = HarborTask.read(self._folder)
        image = read_image(self._folder, task) if self._is_local else Image()
        instruction = (self._folder / "instruction.md").read_text(encoding="utf-8").strip()
        places = [(self._folder / "environment" / source, target) for source, target in image.copies]
        return task, image, instruction, packed(places)

    async def step(self, action: str) -> Observation:
        """Implements `Environment.step`."""
        blocks = _BLOCK.findall(action.rpartition("</think>")[2])
        if not blocks:
            return await self._scored(terminated=True)
        limit_s = self._task.agent.timeout_sec
        if limit_s is not None and asyncio.get_running_loop().time() - self._begun_s > limit_s:
            return await self._scored(truncated=True)
        result = await self._run(blocks[-1], self._task.environment.env, self.timeout_s)
        return Observation(text=self._told(result))

    async def finish(self) -> Observation:
        """Implements `Environment.finish`: the tests score what there is."""
        return await self._scored()

    async def close(self) -> None:
        """Implements `Environment.close`."""
        if self._shell is not None:
            await self._shell.close()

    async def _run(self, command: str, env: Mapping[str, str], limit_s: float) -> CommandResult:
        assert self._shell is not None
        variables = {name: resolved(value) for name, value in env.items()}
        return await self._shell.run_command(command, env=self._image.env | variables, limit_s=limit_s)

    def _told(self, result: CommandResult) -> str:
        output = result.output.decode(errors="replace")
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
            AgentLoopError: They write none: a fault of the task or the sandbox, and no reward of 0.
        """
        assert self._shell is not None
        tests = await asyncio.to_thread(packed, [(self._folder / "tests", _TESTS)])
        await self._run(f"rm -rf {_TESTS} {' '.join(_REWARD_FILES)}; mkdir -p {_LOGS}", {}, _FILES_S)
        await self._shell.unpack(tests, "/")
        verifier = self._task.verifier
        command = f"chmod +x {_TESTS}/test.sh && {_TESTS}/test.sh > {_LOGS}/test-stdout.txt 2>&1"
        ran = await self._run(command, self._task.environment.env | verifier.env, verifier.timeout_sec)
        for path in _REWARD_FILES:
            read = await self._run(f"head -c {_MAX_REWARD_BYTES} {shlex.quote(path)}", {}, _FILES_S)
            if read.exit_code == 0:
                parts = read_rewards(read.output, path)
                reward = parts.pop("reward")
                return Observation(reward=reward, parts=parts, terminated=terminated, truncated=truncated)
        log = await self._run(f"tail -c 500 {_LOGS}/test-stdout.txt", {}, _FILES_S)
        how = "ran past verifier.timeout_sec" if ran.timed_out else f"ended with {ran.exit_code}"
        raise AgentLoopError(
            f"harbor task {self._folder}: tests/test.sh {how} and wrote neither "
            f"{' nor '.join(_REWARD_FILES)}; its output ends: {log.output.decode(errors='replace').strip()}"
        )


def host_shell(folder: Path, task: HarborTask, image: Image) -> TaskShell:
    """Return the default sandbox: commands on this host."""
    return LocalShell(task.environment.workdir or image.workdir, memory_mb=task.environment.memory_mb)


def read_image(folder: Path, task: HarborTask) -> Image:
    """Return what the environment of a task sets up on top of this host's programs.

    Raises:
        EnvironmentNotReady: It needs a container.
    """

    def refuse(why: str) -> EnvironmentNotReady:
        return EnvironmentNotReady(
            f"harbor task {folder} needs a container: {why}. Name a sandbox that starts containers in "
            "rollout.agent_loop_args, `sandbox: module:Class`, or leave the task out"
        )

    environment, source = task.environment, folder / "environment"
    for is_there, why in (
        (environment.os != "linux", f"its system is {environment.os}"),
        (bool(environment.gpus), "it asks for GPUs"),
        (environment.docker_image is not None, f"its image is {environment.docker_image}"),
        (any(source.glob("*compose.y*ml")), "it has a compose file"),
        (task.verifier.environment is not None, "its verifier has an environment of its own"),
        (task.verifier.environment_mode == "separate", "its verifier has an environment of its own"),
        (not (source / "Dockerfile").is_file(), "it has no Dockerfile"),
    ):
        if is_there:
            raise refuse(why)
    workdir, env, copies = "/", dict[str, str](), list[tuple[str, str]]()
    text = re.sub(r"\\\n", " ", (source / "Dockerfile").read_text(encoding="utf-8"))
    for line in filter(None, map(str.strip, text.splitlines())):
        name, _, rest = line.partition(" ")
        name, words = name.upper(), shlex.split(rest, comments=False) if "[" not in rest else []
        if line.startswith("#") or name in _IGNORED:
            continue
        if name == "WORKDIR" and words:
            workdir = str(PurePosixPath(workdir, words[0]))
        elif name == "ENV" and words and all("=" in word for word in words):
            env |= dict(word.split("=", 1) for word in words)
        elif name == "COPY" and len(words) == 2 and not words[0].startswith("--"):
            target = PurePosixPath(workdir, words[1])
            if words[1].endswith(("/", ".")) and not (source / words[0]).is_dir():
                target /= PurePosixPath(words[0]).name
            copies.append((words[0], str(target)))
        else:
            raise refuse(f"its Dockerfile has `{line[:80]}`")
    for path, _ in copies:
        if not (source / path).resolve().is_relative_to(source.resolve()) or not (source / path).exists():
            raise refuse(f"its Dockerfile copies {path!r}, which is not in {source}")
    return Image(workdir=workdir, env=env, copies=tuple(copies))


def packed(places: list[tuple[Path, str]]) -> bytes:
    """Return files and folders as a tar archive, at their absolute targets, owned by root."""

    def owned(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for source, target in places:
            archive.add(source, arcname=target.lstrip("/") or ".", filter=owned)
    return buffer.getvalue()


def read_rewards(content: bytes, path: str) -> dict[str, float]:
    """Return the rewards of a reward file, among them `reward`: that of the name, or the only one.

    Raises:
        AgentLoopError: The file holds something else than finite numbers, or several without a `reward`.

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
        raise AgentLoopError(f"{path} has {content[:100]!r}; expected a number or a JSON object") from error
    values = {name: reward_value(value) for name, value in rewards.items()}
    known = {name: value for name, value in values.items() if value is not None}
    if len(known) < len(values) or ("reward" not in known and len(known) != 1):
        raise AgentLoopError(
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
