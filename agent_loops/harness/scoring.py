"""Scores what a program has left: by a command with files from outside of the workspace, or by a function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from agent_loops.agent_program import NEEDS_FAILED, Program
from agent_loops.harness.place import Place
from agent_loops.rewards_code import code_tests
from async_rl.errors import AgentLoopError, ConfigError, NotScored
from async_rl.runtime.loading import load_object
from async_rl.runtime.serving_clock import serving_timeout
from async_rl.runtime.threads import call_in_thread
from async_rl.types import Completion, Task

_MAX_FILES_BYTES: Final = 16 << 20
"""The most bytes of the files that score, which are kept in memory."""
_NOT_RUN: Final = (126, 127)
"""Exit codes of shells and `env` for a program that cannot be started."""


class ScoreSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a workspace is scored: by a command, or by a function."""

    command: tuple[str, ...] = ()
    """Runs in the workspace after the program. `{files}` is the folder with `files`."""
    files: str | None = None
    """A file or folder that is read when the run starts, and written beside each workspace to score it."""
    result: Literal["exit", "last_line", "file"] = "exit"
    """`exit`: 1 for the exit code 0, else 0. `last_line`: the last line of its output. `file`: the file that
    SCORE_FILE names. Both hold a number, or a JSON object of numbers with `reward`."""
    function: str | None = None
    """`module:function`, called with the task and the workspace's path, instead of a command."""
    args: dict[str, Any] = {}
    """Further arguments of the function."""
    fresh: bool = False
    """Whether a command runs in a new sandbox of the same image, with a copy of the workspace alone."""
    timeout_s: Annotated[float, Meta(gt=0)] = 120.0
    """A command that takes longer scores 0; a function fails the attempt."""


class Scorer:
    """Scores workspaces with what the run began with, whatever happened to the files since."""

    def __init__(self, given: str | Mapping[str, Any]) -> None:
        """Read the files.

        Args:
            given: The fields of `ScoreSettings`, or `module:function`.

        Raises:
            ConfigError: A field is wrong, or the files cannot be read.
        """
        fields = {"function": given} if isinstance(given, str) else given
        try:
            self._settings = settings = msgspec.convert(fields, ScoreSettings)
        except msgspec.ValidationError as error:
            raise ConfigError(f"rollout.agent_loop_args: score: {error}") from error
        if bool(settings.command) == (settings.function is not None):
            raise ConfigError("rollout.agent_loop_args: score: expected either command or function")
        if settings.fresh and not settings.command:
            raise ConfigError(
                "rollout.agent_loop_args: score: fresh goes with a command; a function runs here"
            )
        self.is_fresh = settings.fresh
        """Whether the place must be a new sandbox."""
        self._function: Callable[..., Any] | None = None
        if settings.function is not None:
            self._function = load_object(settings.function, what="score")
        self._files = {} if settings.files is None else _read_files(Path(settings.files))

    async def parts(self, task: Task, place: Place) -> dict[str, float]:
        """Return the reward and its parts.

        Raises:
            NotScored: The workspace could not be scored, so that any score would be wrong.
        """
        if self._function is not None:
            return await self._parts_of_function(self._function, task, place)
        settings = self._settings
        folder = await place.make_folder("score")
        await place.write_files(self._files, folder)
        file = f"{await place.make_folder('result')}/score"
        try:
            program = await place.run_command(
                [word.replace("{files}", folder) for word in settings.command],
                environment={"SCORE_FILE": file, "WORKSPACE": place.workspace},
                stdin=msgspec.json.encode(
                    {"id": task.task_id, "answer": task.answer, "metadata": task.metadata}, enc_hook=str
                ),
                limit_s=settings.timeout_s,
            )
        except AgentLoopError as error:  # it does not start
            raise NotScored(f"the score could not be computed: {error}") from error
        if program.ended_by:
            return {"reward": 0.0, "score_timeout": 1.0}
        code = program.exit_code
        if code is None or code < 0 or code in (*_NOT_RUN, NEEDS_FAILED):
            raise NotScored(f"the score could not be computed: {program.failure}")
        if settings.result == "exit":
            return {"reward": float(code == 0)}
        if code:
            raise NotScored(f"the score could not be computed: {program.failure}")
        return _parts_of(await self._text_of(program, place, file), settings.result)

    async def _text_of(self, program: Program, place: Place, file: str) -> str:
        if self._settings.result == "last_line":
            lines, _ = program.output()
            return lines[-1] if lines else ""
        try:
            return await place.read_text(file)
        except OSError as error:
            raise NotScored(f"the score's command wrote no file SCORE_FILE: {program.failure}") from error

    async def _parts_of_function(
        self, function: Callable[..., Any], task: Task, place: Place
    ) -> dict[str, float]:
        call = partial(function, task, place.local_workspace, **self._settings.args)
        try:
            async with serving_timeout(self._settings.timeout_s):
                if inspect.iscoroutinefunction(function):
                    value = await call()
                else:
                    value = await call_in_thread(call, name=f"score {self._settings.function}")
        except TimeoutError as error:
            raise NotScored(
                f"score {self._settings.function} took longer than timeout_s = {self._settings.timeout_s:g}"
            ) from error
        return _parts_of(msgspec.json.encode(value).decode(), "function")


async def score(task: Task, completion: Completion) -> dict[str, float]:
    """Return the score of the attempt: `rollout.reward: agent_loops.harness:score`.

    Raises:
        ValueError: The attempt has none, so that any reward would be wrong.
    """
    if "reward" not in completion.reported:
        raise ValueError(
            "the agent loop has reported no reward: harness:score belongs to agent_loops.harness:HarnessLoop "
            "with agent_loop_args.score"
        )
    return dict(completion.reported)


async def file_tests(task: Task, workspace: Path, *, file: str, **how: Any) -> dict[str, float]:
    """Test a file of the workspace by the tests in the task's answer, in the sandbox.

    Args:
        task: The task, whose answer `agent_loops.rewards_code` reads.
        workspace: The folder.
        file: The file's name; a missing file is an empty program.
        **how: Further arguments of `code_tests`: `partial`, and limits of the sandbox.
    """
    path = workspace / file
    text = path.read_text(errors="replace") if path.is_file() and not path.is_symlink() else ""
    fence = "~" * 16
    block = f"{fence}python\n{text}\n{fence}"
    answer = Completion(
        messages=[*task.messages, {"role": "assistant", "content": block}],
        text=block,
        stop_reason="completed",
    )
    return await code_tests(task, answer, **how)


def _read_files(path: Path) -> dict[str, bytes]:
    try:
        if path.is_file():
            files = {path.name: path.read_bytes()}
        else:
            found = sorted(each for each in path.rglob("*") if each.is_file())
            if not found:
                raise OSError("there are no files")
            if sum(each.stat().st_size for each in found) > _MAX_FILES_BYTES:
                raise OSError(f"they have more than {_MAX_FILES_BYTES >> 20} MiB")
            files = {str(each.relative_to(path)): each.read_bytes() for each in found}
    except OSError as error:
        raise ConfigError(f"rollout.agent_loop_args: score: files is {str(path)!r}: {error}") from error
    return files


def _parts_of(text: str, origin: str) -> dict[str, float]:
    """Return the numbers of a result.

    Raises:
        NotScored: It is neither a number nor an object of numbers with `reward`.
    """
    try:
        value = msgspec.json.decode(text.strip(), type=float | dict[str, float])
    except msgspec.DecodeError:
        value = {}
    parts = value if isinstance(value, dict) else {"reward": value}
    if "reward" not in parts:
        raise NotScored(
            f"the score ({origin}) is {text!r:.200}; expected a number, or a JSON object of numbers with "
            "reward"
        )
    return parts
