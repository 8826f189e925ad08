"""The agent loop that runs a command-line agent in a workspace, collects what it has left, and scores it."""

from __future__ import annotations

import os
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any, Final, Literal, Self

import msgspec
from msgspec import Meta

from agent_loops.agent_program import AgentProgram, ChildProcess, Start, endpoint_variables
from agent_loops.harness.forking import ForkServer
from agent_loops.harness.place import Collected, Place, Source, local_place
from agent_loops.harness.presets import filled, parse_program
from agent_loops.harness.sandbox_place import MAX_OUTPUT_BYTES, SandboxPlace, sandbox_place
from agent_loops.harness.scoring import Scorer
from agent_loops.openai_agent import OpenAIAgentLoop
from agent_loops.sandboxes import Sandboxes
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
        sandbox: Where all of an attempt runs instead of a folder of this host: the arguments of
            `agent_loops.sandboxes.Sandboxes`, with a backend that runs agents; `image_field`, the field of a
            task's metadata that names its image; and `workspace`, a folder of the image, such as `/testbed`,
            in which the program starts instead of in a copy.
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
        sandbox: Mapping[str, Any] | None = None,
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
        self._sandboxes: Sandboxes | None = None
        self._inside = ""
        """A folder of the image that is the workspace."""
        if sandbox is not None:
            self._sandboxes = self._make_sandboxes(**sandbox)
            self._runs_here = False
        if self._inside and workspace is not None:
            raise ConfigError(
                "rollout.agent_loop_args: workspace and sandbox.workspace exclude each other: one is copied "
                "into the sandbox, the other one is a folder of its image"
            )
        super().__init__(command=settings.whole_command, nonzero_exit=nonzero_exit, **serving)
        self._source = Source(workspace)
        self._scorer = None if score is None else Scorer(score)
        if self._sandboxes is None and self._scorer is not None and self._scorer.is_fresh:
            raise ConfigError(
                "rollout.agent_loop_args: score: fresh goes with sandbox: it is scored in a new one"
            )
        self._server = ForkServer(settings) if settings.imports else None

    def _make_sandboxes(
        self,
        backend: str | Mapping[str, Any] = "containers",
        image_field: str = "",
        workspace: str = "",
        **options: Any,
    ) -> Sandboxes:
        try:
            sandboxes = Sandboxes(backend, max_output_bytes=MAX_OUTPUT_BYTES, **options)
        except TypeError as error:
            raise ConfigError(f"rollout.agent_loop_args: sandbox: {error}") from error
        if not sandboxes.runs_agents:
            raise ConfigError(
                f"rollout.agent_loop_args: sandbox: backend is {backend!r}, which runs single commands; "
                "expected containers, or your own `AgentBackend`"
            )
        if self._program.imports:
            raise ConfigError(
                "rollout.agent_loop_args: program: imports and sandbox exclude each other: programs are "
                "forked from processes of this host"
            )
        needed_s = self._bounds.setup_timeout_s + self._bounds.timeout_s
        if sandboxes.ttl_s <= needed_s:
            raise ConfigError(
                f"rollout.agent_loop_args: sandbox: ttl_s is {sandboxes.ttl_s:g}; expected more than "
                f"{needed_s:g}, the sum of setup_timeout_s and timeout_s"
            )
        if workspace and not re.fullmatch("(/[^/]+)+", workspace):
            raise ConfigError(
                f"rollout.agent_loop_args: sandbox: workspace is {workspace!r}; expected a folder of the "
                "image, such as /testbed"
            )
        self._image_field, self._inside = image_field, workspace
        return sandboxes

    async def __aenter__(self) -> Self:
        """Serve, and start the sandboxes, or the process from which programs are forked."""
        await super().__aenter__()
        if (runs_programs := self._server or self._sandboxes) is not None:
            try:
                await self._serving.enter_async_context(runs_programs)
            except BaseException:
                await self._serving.aclose()
                raise
        return self

    def check(self, chat_template: str) -> list[str]:
        """Return the findings for `async-rl check`."""
        findings = super().check(chat_template)
        if self._sandboxes is None:
            findings.append("programs run as this user, in folders that are no wall: docs/security.md")
        return findings

    async def run(self, task: Task, session: Session) -> StopReason | None:
        """Implements `AgentLoop.run`."""
        bounds = self._bounds
        async with self._open_place(task, session) as place:
            await self._set_up(task, place)
            made: list[AgentProgram] = []
            begin_s = time.monotonic()

            async def make(access: EndpointAccess) -> AgentProgram:
                if place.root_url is not None:
                    access = msgspec.structs.replace(access, root_url=place.root_url)
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
                    parts = await self._score(self._scorer, task, session, place)
                notes = {"score": parts, **notes}
                session.report(**parts)
                session.share_reward()  # all conversations are rewarded for this report
            if session.num_turns:
                session.annotate(harness=_fitted(notes, _MAX_NOTES_BYTES))
            return reason

    @asynccontextmanager
    async def _open_place(self, task: Task, session: Session) -> AsyncIterator[Place]:
        source, inherit = self._source.of(task), self._program.inherit
        max_bytes = self._bounds.max_workspace_mb << 20
        if self._sandboxes is None:
            async with local_place(source, max_bytes=max_bytes, inherit=inherit) as local:
                yield local
            return
        async with (
            self._sandboxes.open(session, image=self._image_of(task)) as box,
            sandbox_place(
                box,
                source,
                self.endpoint,
                inside=self._inside,
                max_bytes=max_bytes,
                limit_s=self._sandboxes.ttl_s,
                inherit=inherit,
            ) as place,
        ):
            yield place

    def _image_of(self, task: Task) -> str:
        return str(task.metadata.get(self._image_field, "")) if self._image_field else ""

    async def _score(self, scorer: Scorer, task: Task, session: Session, place: Place) -> dict[str, float]:
        """Return the parts of the reward, from where the program ran or from a new sandbox."""
        if not scorer.is_fresh:
            return await scorer.parts(task, place)
        assert self._sandboxes is not None
        assert isinstance(place, SandboxPlace)
        self._sandboxes.end_sandbox(place.box.name)  # the new one may wait for its end: `max_open`
        async with self._sandboxes.open(session, image=self._image_of(task)) as box:
            return await scorer.parts(task, await place.moved_to(box))

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
