"""The agent loop that runs a command-line agent in a workspace, collects what it has left, and scores it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, Self

import msgspec
from msgspec import Meta

from agent_loops.agent_program import AgentProgram, ChildProcess, Start, endpoint_variables
from agent_loops.harness.forking import ForkServer
from agent_loops.harness.place import Collected, Place, Source, local_place
from agent_loops.harness.presets import filled, parse_program
from agent_loops.harness.scoring import Scorer
from agent_loops.openai_agent import OpenAIAgentLoop
from async_rl.errors import AgentLoopError, ConfigError
from async_rl.openai_api.endpoint import EndpointAccess
from async_rl.rollout.session.api import Session
from async_rl.types import StopReason, Task

_MAX_NOTES_BYTES: Final = 3500
"""A turn has 4096 bytes of notes."""
_NUM_OUTPUT_LINES: Final = 20
_MIN_CHARS: Final = 32
"""Texts are not cut shorter than this, as long as there are fewer files to show."""


class _Bounds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a program may use."""

    setup: tuple[str, ...] = ()
    collect: tuple[str, ...] = ()
    timeout_s: Annotated[float, Meta(gt=0)] = 1800.0
    setup_timeout_s: Annotated[float, Meta(gt=0)] = 300.0
    max_workspace_mb: Annotated[int, Meta(ge=1)] = 1024


class HarnessLoop(OpenAIAgentLoop):
    """Runs a command-line agent in a fresh workspace for each attempt, and scores what it has left there.

    All its requests are conversations of the attempt, which are rewarded alike: for the score, if the reward
    function is `agent_loops.harness:score`, else for the last answer.

    Args:
        program: A preset (`claude-code`, `codex`, `mini-swe-agent`, `aider`), or the fields of
            `presets.ProgramSettings`, with `preset` as their base.
        workspace: What the workspace is copied from: a folder, a tar archive or a git bundle. A task's
            metadata may name one of these below it as `workspace`. Without it the workspace is empty.
        setup: A command that prepares the workspace before the program; if it fails, so does the attempt.
        score: How the workspace is scored: the fields of `scoring.ScoreSettings`, or `module:function`.
        timeout_s: The program is ended after this time, and what it has left is scored.
        setup_timeout_s: The longest time of the setup.
        max_workspace_mb: A program with more files than this, in MiB, is ended, and its attempt is scored 0.
        collect: Patterns of files whose beginnings are shown by `async-rl inspect`; `~/` is its home folder.
        nonzero_exit: What follows from an exit code above 0, as for `OpenAIAgentLoop`; with `score`, what the
            program has left is scored all the same.
        serving: Further arguments of `OpenAIAgentLoop`: parser, opens_thought, and how the API is served.

    Raises:
        ConfigError: A program or file does not exist, or an argument has another type or range.
    """

    descriptors_per_trajectory = 12
    """Both ends of a connection, a program's pipes, and those of setup and score."""

    def __init__(
        self,
        program: str | Mapping[str, Any],
        workspace: str | None = None,
        setup: Sequence[str] = (),
        score: str | Mapping[str, Any] | None = None,
        timeout_s: float = 1800.0,
        setup_timeout_s: float = 300.0,
        max_workspace_mb: int = 1024,
        collect: Sequence[str] = (),
        nonzero_exit: Literal["fail", "zero", "score"] = "fail",
        **serving: Any,
    ) -> None:
        self._program = settings = parse_program(program)
        bounds = {
            "setup": setup,
            "collect": collect,
            "timeout_s": timeout_s,
            "setup_timeout_s": setup_timeout_s,
            "max_workspace_mb": max_workspace_mb,
        }
        try:
            self._bounds = msgspec.convert(bounds, _Bounds)
        except msgspec.ValidationError as error:
            raise ConfigError(f"rollout.agent_loop_args: {error}") from error
        super().__init__(command=settings.whole_command, nonzero_exit=nonzero_exit, **serving)
        self._source = Source(workspace)
        self._scorer = None if score is None else Scorer(score)
        self._server = ForkServer(settings) if settings.imports else None

    async def __aenter__(self) -> Self:
        """Serve, and start the process from which programs are forked."""
        await super().__aenter__()
        if self._server is not None:
            try:
                await self._serving.enter_async_context(self._server)
            except BaseException:
                await self._serving.aclose()
                raise
        return self

    def check(self, chat_template: str) -> list[str]:
        """Return the findings for `async-rl check`."""
        findings = super().check(chat_template)
        findings.append("programs run as this user, in folders that are no wall: docs/security.md")
        return findings

    async def run(self, task: Task, session: Session) -> StopReason | None:
        """Implements `AgentLoop.run`."""
        bounds = self._bounds
        place_of_task = local_place(
            self._source.of(task),
            max_bytes=bounds.max_workspace_mb << 20,
            inherit=self._program.inherit,
        )
        async with place_of_task as place:
            await self._set_up(task, place)
            made: list[AgentProgram] = []
            begin_s = time.monotonic()

            async def make(access: EndpointAccess) -> AgentProgram:
                made.append(await self._make_program(task, place, access))
                return made[0]

            reason = await self._run_agent(task, session, make)
            program, seconds = made[0], time.monotonic() - begin_s
            if await place.is_full():
                program.ended_by = "size"
            collected = await place.collect(bounds.collect)
            notes = _notes(program, seconds, collected)
            if program.ended_by == "size":
                reason = "failed"
            if self._scorer is not None or reason == "failed":
                session.status = "scoring the workspace"
                parts = {"reward": 0.0}
                if self._scorer is not None and reason != "failed":
                    parts = await self._scorer.parts(task, place)
                notes = {"score": parts, **notes}
                session.report(**parts)
                session.share_reward()  # all conversations are rewarded for this report
            if session.num_turns:
                session.annotate(harness=_fitted(notes, _MAX_NOTES_BYTES))
            return reason

    async def _set_up(self, task: Task, place: Place) -> None:
        if command := self._bounds.setup:
            request = msgspec.json.encode({"id": task.task_id, "metadata": task.metadata}, enc_hook=str)
            program = await place.run_command(
                command, environment={}, stdin=request, limit_s=self._bounds.setup_timeout_s
            )
            if program.exit_code != 0:
                raise AgentLoopError(f"the setup of the workspace failed: {program.failure}")

    async def _make_program(self, task: Task, place: Place, access: EndpointAccess) -> AgentProgram:
        """Write the files of an attempt's program, and return the program."""
        settings, text = self._program, task_text(task)
        values = {
            "task": text,
            "task_file": f"{place.home}/task.md",
            "model": access.model,
            "base_url": access.base_url,
            "root_url": access.root_url,
            "key": access.api_key,
            "home": place.home,
            "workspace": place.workspace,
        }
        files = {"task.md": text} | {name: filled(file, values) for name, file in settings.files.items()}
        await place.write_files({name: file.encode() for name, file in files.items()}, place.home)
        given = {name: filled(value, values) for name, value in settings.environment.items()}
        start: Start = ChildProcess if self._server is None else self._server.start
        return place.agent_program(
            [filled(word, values) for word in settings.whole_command],
            access,
            task,
            environment={**endpoint_variables(os.environ, access), **given},
            stdin=text.encode() if settings.reads_stdin else b"",
            limit_s=self._bounds.timeout_s,
            start=start,
        )


def task_text(task: Task) -> str:
    """Return the messages of a task as one text for a program."""
    return "\n\n".join(str(message["content"]) for message in task.messages)


def _notes(program: AgentProgram, seconds: float, collected: Collected) -> dict[str, Any]:
    stdout, stderr = program.output()
    return {
        "ended": program.ended_by or program.exit_code,
        "seconds": round(seconds, 1),
        "changed": "\n".join(collected.changed),
        "files": collected.files,
        "diff": collected.diff,
        "stdout": "\n".join(stdout[-_NUM_OUTPUT_LINES:]),
        "stderr": "\n".join(stderr[-_NUM_OUTPUT_LINES:]),
    }


def _fitted(notes: dict[str, Any], limit: int) -> dict[str, Any]:
    """Return notes with at most `limit` bytes of JSON: all texts are cut at one length."""
    files: dict[str, str] = notes["files"]
    length = limit
    while True:
        fitted = {name: _cut(value, length) for name, value in notes.items()}
        fitted["files"] = {name: _cut(text, length) for name, text in files.items()}
        if len(msgspec.json.encode(fitted)) <= limit:
            return fitted
        length = length * 3 // 4
        if length < _MIN_CHARS:  # the names are too many
            files, length = dict(list(files.items())[: len(files) // 2]), limit


def _cut(value: Any, length: int) -> Any:
    return f"{value[:length]} …" if isinstance(value, str) and len(value) > length else value
