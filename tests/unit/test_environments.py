"""Environments as agent loops: rewards, ends and faults, and the adapters that need no package of others."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from aiohttp import WSMsgType, web

from agent_loops.environment import (
    Environment,
    EnvironmentLoop,
    Observation,
    environment_reward,
    openenv,
    verifiers,
)
from agent_loops.environment.gymnasium import read_action
from agent_loops.environment.harbor import HarborTask, read_image, read_rewards, resolved
from agent_loops.testing import ScriptedSession, make_task
from async_rl.errors import AgentLoopError, ConfigError, EnvironmentNotReady, NotScored, PromptTooLong
from async_rl.runtime.threads import start_in_thread
from async_rl.types import Completion, StopReason, Task
from tests.support.sessions import Bench, Watched, simulated

HERE = "tests.unit.test_environments"
GUIDE = Path(__file__).parents[2] / "docs" / "guide"
FOLDERS = Path(__file__).parents[2] / "examples" / "environments" / "harbor"


class Countdown(Environment):
    """Pays 1 for each `down`, ends at zero with 10, and pays 5 when it is given up."""

    made: ClassVar[list[Countdown]] = []

    def __init__(self, start: int = 2, fault: str = "", limit: int = 99) -> None:
        if start < 1:
            raise ValueError("start is too small")
        self.start, self.fault, self.limit = start, fault, limit
        self.steps = self.closed = 0

    async def reset(self, task: Task) -> Observation:
        Countdown.made.append(self)
        await self._fail("reset")
        return Observation(text=f"At {self.start}.")

    async def step(self, action: str) -> Observation:
        self.steps += 1
        await self._fail("step")
        if action != "down":
            return Observation(text="Write down.", is_invalid=True)
        self.start -= 1
        return Observation(
            text=f"At {self.start}.",
            reward=10.0 if self.start == 0 else 1.0,
            terminated=self.start == 0,
            truncated=self.steps == self.limit,
            parts={"left": float(self.start)},
        )

    async def finish(self) -> Observation:
        return Observation(reward=5.0, parts={"given_up": 1.0})

    async def close(self) -> None:
        self.closed += 1

    async def _fail(self, where: str) -> None:
        if self.fault == f"{where} hangs":
            await asyncio.sleep(10_000)
        if self.fault == f"{where} raises":
            raise RuntimeError("the board fell down")


@pytest.fixture(autouse=True)
def _none_made() -> None:
    Countdown.made.clear()


async def played(
    *turns: str | tuple[str, str],
    task: Task | None = None,
    session: ScriptedSession | None = None,
    environment: str = f"{HERE}:Countdown",
    **args: Any,
) -> tuple[ScriptedSession, StopReason | None]:
    session = session or ScriptedSession(*turns, task=task or make_task())
    async with EnvironmentLoop(environment, **args) as loop:
        return session, await loop.run(session.task, session)


async def test_observations_are_messages_and_rewards_are_of_turns_until_the_end() -> None:
    session, ended = await played("down", "up", "down")
    assert ended == "completed"
    assert [(m["role"], m["content"]) for m in session.messages] == [
        ("user", "What is 2 + 2?\n\nAt 2."),
        ("assistant", "down"),
        ("user", "At 1."),
        ("assistant", "up"),
        ("user", "Write down."),
        ("assistant", "down"),
    ]
    assert session.turn_rewards == [1.0, 0.0]
    reward = environment_reward(session.task, session.completion(ended))
    assert reward == {"reward": 10.0, "return": 11.0, "steps": 3, "invalid_actions": 1, "left": 0.0}
    assert session.tool_calls == ["ok", "error", "ok"]
    assert [each.closed for each in Countdown.made] == [1]


@pytest.mark.parametrize(
    ("turns", "args", "why"),
    [
        (["down"], {"max_turns": 1, "start": 5}, "max_turns"),
        (["down", ("dow", "length")], {"start": 5}, "length"),
    ],
)
async def test_an_episode_that_is_cut_has_the_reward_that_finish_gives(
    turns: list[Any], args: dict[str, Any], why: str
) -> None:
    session, ended = await played(*turns, **args)
    assert ended == why
    assert session.turn_rewards == [1.0]
    assert session.reported["reward"] == 5.0
    assert session.reported["return"] == 6.0
    assert session.reported["given_up"] == 1.0


async def test_a_full_context_ends_the_episode_and_an_endless_prompt_the_attempt() -> None:
    session = ScriptedSession("down", "down")
    session.tokens_per_message = 1000
    _, ended = await played(session=session, start=5)
    assert (ended, session.reported["reward"]) == ("length", 5.0)

    full = ScriptedSession("down")
    full.remaining_tokens = 0
    with pytest.raises(PromptTooLong):
        await played(session=full)
    assert "reward" not in full.reported


async def test_a_limit_of_the_environment_truncates() -> None:
    session, ended = await played("down", "down", start=5, limit=2)
    assert ended == "max_turns"
    assert session.reported["reward"] == 1.0
    assert session.turn_rewards == [1.0]


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("reset raises", "reset raised RuntimeError: the board fell down"),
        ("step raises", "step raised RuntimeError: the board fell down"),
        ("reset hangs", "reset took longer than rollout.tool_timeout_s = 5"),
        ("step hangs", "step took longer than rollout.tool_timeout_s = 5"),
    ],
)
async def test_a_fault_fails_the_attempt_without_a_reward(fault: str, why: str) -> None:
    session = ScriptedSession("down")
    with pytest.raises(AgentLoopError, match=why):
        await played(session=session, fault=fault)
    assert session.reported == {}
    assert session.turn_rewards == []
    assert [each.closed for each in Countdown.made] == [1]


async def test_it_is_closed_when_the_attempt_is_cancelled() -> None:
    task = asyncio.ensure_future(played("down", fault="step hangs"))
    await asyncio.sleep(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [each.closed for each in Countdown.made] == [1]


@pytest.mark.parametrize(
    ("environment", "args", "why"),
    [
        ("chess", {}, "expected one of gymnasium, harbor, openenv, verifiers, or `module:Class`"),
        (f"{HERE}:Countdown", {"start": 0}, "start is too small"),
        (f"{HERE}:Countdown", {"colour": "red"}, "colour"),
        (f"{HERE}:Countdown", {"max_turns": 0}, "max_turns is 0"),
        (f"{HERE}:SimpleNamespace", {}, "expected an Environment or an AgentLoop"),
        ("harbor", {"sandbox": {"backend": "nowhere"}}, "expected {kind: local, containers"),
        ("harbor", {"sandbox": {"imgae": "x"}}, "sandbox: .*imgae"),
        ("openenv", {"url": "127.0.0.1:80"}, "expected http://HOST:PORT"),
        ("openenv", {"url": "http://a", "transport": "mail"}, "expected websocket or http"),
        ("verifiers", {"id": "a", "python": "/no/python"}, "there is no program '/no/python'"),
        ("verifiers", {"id": "a", "agent": "b:c"}, "agent does not go with an environment"),
        (
            "verifiers",
            {"id": "a", "max_turns": 3},
            "max_turns and stop do not go with environment",
        ),
    ],
)
def test_a_wrong_argument_is_an_error_of_the_config(environment: str, args: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        EnvironmentLoop(environment, **args)


@pytest.mark.parametrize(
    ("environment", "args", "package"),
    [("gymnasium", {"id": "FrozenLake-v1"}, "gymnasium")],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    environment: str, args: dict[str, Any], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hidden:
        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> None:
            if name == package:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(sys, "meta_path", [Hidden, *sys.meta_path])
    with pytest.raises(EnvironmentNotReady, match=f"pip install '{package}"):
        EnvironmentLoop(environment, **args)


@pytest.mark.real_time
async def test_an_interpreter_without_verifiers_is_named_with_the_command_that_installs_it(
    tmp_path: Path,
) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # without installed packages
    bare.chmod(0o755)
    with pytest.raises(EnvironmentNotReady, match=f"{bare} does not have: run `pip install 'verifiers>"):
        async with EnvironmentLoop("verifiers", id="a", python=str(bare)):
            pass


@pytest.mark.real_time
async def test_a_process_that_has_ended_is_known_as_soon_as_its_episodes_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread takes a moment longer: who asked in it would wait for an answer that never comes."""

    def start_slowly(target: Callable[[], None], *, name: str) -> Any:
        def attend() -> None:
            target()
            time.sleep(0.3)

        return start_in_thread(attend, name=name)

    monkeypatch.setattr(verifiers, "start_in_thread", start_slowly)
    program = tmp_path / "python"
    program.write_text("""#!/bin/sh\necho '{"number": 0, "ready": true}'\nread request\nexit 3\n""")
    program.chmod(0o755)
    process = verifiers.VerifiersProcess("any", {}, str(program))
    await process.start({})
    assert not process.has_ended
    with pytest.raises(AgentLoopError, match="its process ended with 3"):
        await process.ask({"episode": {}})
    assert process.has_ended
    await process.close()


async def test_a_task_that_is_none_of_verifiers_is_refused_with_the_command_that_writes_them() -> None:
    with pytest.raises(AgentLoopError, match=r"python -m agent_loops\.environment\.verifiers CONFIG FILE"):
        await EnvironmentLoop("verifiers", id="a").run(make_task(), ScriptedSession())


def test_a_reward_that_no_loop_has_reported_is_an_error() -> None:
    completion = Completion(messages=[], text="", stop_reason="completed")
    with pytest.raises(ValueError, match="has reported no reward"):
        environment_reward(make_task(), completion)


@pytest.mark.parametrize(("guess", "reward"), [("7", 1.0), ("8", 0.0)])
async def test_the_environment_of_the_guide_works_as_shown(
    guess: str, reward: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (GUIDE / "environments.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "guess_digit_of_the_guide.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    session, _ = await played("seven", guess, environment="guess_digit_of_the_guide:GuessDigit", max_turns=2)
    assert session.reported["reward"] == reward
    assert session.reported["invalid_actions"] == 1


async def test_a_session_carries_what_its_loop_reports_to_the_reward_function() -> None:
    bench = Bench(simulated(Watched()), max_new_tokens=4)
    bench.start()
    await bench.session.generate()
    bench.session.report(reward=0.25, solved=True)
    bench.session.report(reward=0.5)
    assert bench.session.completion.reported == {"reward": 0.5, "solved": 1.0}
    for wrong in (float("nan"), "1", None):
        with pytest.raises(ValueError, match=r"session\.report got reward="):
            bench.session.report(reward=wrong)  # type: ignore[arg-type]
    assert bench.session.completion.reported == {"reward": 0.5, "solved": 1.0}


# -- gymnasium ---------------------------------------------------------------------------------------------


class Discrete:
    """As `gymnasium.spaces.Discrete`; the real one is in tests/contract/test_environments_sglang.py."""

    def __init__(self, n: int, start: int = 0) -> None:
        self.n, self.start = n, start

    def contains(self, value: Any) -> bool:
        return isinstance(value, int) and self.start <= value < self.start + self.n

    def __repr__(self) -> str:
        return f"Discrete({self.n})"


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("Right", 2),
        ("<think>left? left!</think>I go down.", 1),
        ("not left but right", 2),
        ("2", 2),
        ("Action: 0.", 0),
    ],
)
def test_the_last_name_or_number_is_the_action(text: str, action: int) -> None:
    env = SimpleNamespace(action_space=Discrete(3))
    assert read_action(text, env, ["left", "down", "right"]) == action


@pytest.mark.parametrize("text", ["", "7", "upright", "-1", "9" * 5000, "<think>left</think>"])
def test_other_text_is_no_action(text: str) -> None:
    env = SimpleNamespace(action_space=Discrete(3))
    with pytest.raises(ValueError, match="expected one of left, down, right"):
        read_action(text, env, ["left", "down", "right"])


# -- OpenEnv -----------------------------------------------------------------------------------------------

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def served(**handlers: Handler) -> AsyncIterator[str]:
    app = web.Application()
    for name, handler in handlers.items():
        app.router.add_route("*", f"/{name}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def seen(text: str, reward: float | None = None, done: bool = False) -> dict[str, Any]:
    return {"observation": {"text": text, "metadata": {}}, "reward": reward, "done": done, "metadata": None}


async def over_websocket(log: list[Any], request: web.Request) -> web.WebSocketResponse:
    """Two steps; the second one ends the episode. It is busy for the first connection."""
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    log.append("connected")
    if log.count("connected") == 1:
        await socket.send_json({"type": "error", "data": {"message": "full", "code": "CAPACITY_REACHED"}})
        await socket.close()
        return socket
    steps = 0
    async for message in socket:
        if message.type is not WSMsgType.TEXT:
            break
        asked = json.loads(message.data)
        log.append(asked)
        if asked["type"] == "reset":
            answer = {"type": "observation", "data": seen("Go.")}
        elif asked["data"] == {"say": "bad"}:
            errors = [{"loc": ["say"], "msg": "too bad", "type": "value_error"}]
            answer = {"type": "error", "data": {"code": "VALIDATION_ERROR", "errors": errors}}
        elif asked["data"] == {"say": "crash"}:
            answer = {"type": "error", "data": {"code": "EXECUTION_ERROR", "message": "boom"}}
        else:
            steps += 1
            answer = {"type": "observation", "data": seen("More.", 0.5, done=steps == 2)}
        await socket.send_json(answer)
    log.append("closed")
    return socket


@asynccontextmanager
async def websocket_server() -> AsyncIterator[tuple[str, list[Any]]]:
    log: list[Any] = []

    async with served(ws=partial(over_websocket, log)) as url:
        yield url, log


@pytest.mark.real_time
async def test_an_episode_over_a_websocket_is_begun_again_while_the_server_is_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(openenv, "FIRST_DELAY_S", 0.0)
    task = make_task(metadata={"reset": {"seed": 3}})
    async with websocket_server() as (url, log):
        session, ended = await played(
            "a", "bad", "b", task=task, environment="openenv", url=url, action_field="say"
        )
    assert ended == "completed"
    texts = [message["content"] for message in session.messages if message["role"] == "user"]
    assert texts == ["What is 2 + 2?\n\nGo.", "More.", "Invalid action: say: too bad"]
    assert session.turn_rewards == [0.5, 0.0]
    assert session.reported["return"] == 1.0
    assert log == [
        "connected",
        "connected",
        {"type": "reset", "data": {"seed": 3}},
        *({"type": "step", "data": {"say": text}} for text in ("a", "bad", "b")),
        "closed",
    ]


@pytest.mark.real_time
async def test_an_error_of_the_server_fails_the_attempt_and_its_step_is_not_repeated() -> None:
    async with websocket_server() as (url, log):
        with pytest.raises(AgentLoopError, match="EXECUTION_ERROR: boom"):
            await played("crash", environment="openenv", url=url, action_field="say")
    assert log.count({"type": "step", "data": {"say": "crash"}}) == 1


@pytest.mark.real_time
async def test_an_episode_over_http_reads_json_actions() -> None:
    asked: list[Any] = []

    async def reset(request: web.Request) -> web.Response:
        asked.append(await request.json())
        return web.json_response(seen("Go."))

    async def step(request: web.Request) -> web.Response:
        asked.append(await request.json())
        if asked[-1]["action"] == {"x": 0}:
            return web.json_response({"detail": [{"loc": ["x"], "msg": "is zero"}]}, status=422)
        return web.json_response(seen("Done.", 1.0, done=True))

    async with served(reset=reset, step=step) as url:
        session, ended = await played(
            "no JSON", '{"x": 0}', '```json\n{"x": 1}\n```', environment="openenv", url=url, transport="http"
        )
    assert ended == "completed"
    assert asked == [{}, {"action": {"x": 0}}, {"action": {"x": 1}}]
    assert session.reported["invalid_actions"] == 2
    assert "expected a JSON object" in session.messages[2]["content"]
    assert session.messages[4]["content"] == "Invalid action: x: is zero"
    assert session.reported["reward"] == 1.0


@pytest.mark.real_time
async def test_answers_that_are_no_observation_fail_the_attempt() -> None:
    elsewhere: list[str] = []

    async def trap(request: web.Request) -> web.Response:
        elsewhere.append(request.path)
        return web.json_response(seen("Caught."))

    async def redirect(request: web.Request) -> web.Response:
        raise web.HTTPFound("/trap")

    async def huge(request: web.Request) -> web.Response:
        return web.Response(body=b" " * (openenv.MAX_ANSWER_BYTES + 1))

    async def text(request: web.Request) -> web.Response:
        return web.Response(text="<html>")

    async def broken(request: web.Request) -> web.Response:
        return web.Response(status=500, text="Traceback")

    for handler, why in (
        (redirect, "answered 302"),
        (huge, "sent more than"),
        (text, "does not answer in OpenEnv's format"),
        (broken, "answered 500: Traceback"),
    ):
        async with served(reset=handler, trap=trap) as url:
            with pytest.raises(AgentLoopError, match=why):
                await played("a", environment="openenv", url=url, transport="http")
    assert elsewhere == []


@pytest.mark.real_time
async def test_a_server_that_is_not_there_is_named_at_the_time_limit() -> None:
    session = ScriptedSession("a", tool_timeout_s=openenv.FIRST_DELAY_S / 2)
    with pytest.raises(AgentLoopError, match=r"127\.0\.0\.1:9 takes no episode"):
        await played(session=session, environment="openenv", url="http://127.0.0.1:9")


# -- Harbor ------------------------------------------------------------------------------------------------


def harbor_task(name: str) -> Task:
    return make_task(metadata={"folder": str(FOLDERS / name)})


def block(command: str) -> str:
    return f"<think>```bash\nexit 1\n```</think>Now:\n```bash\n{command}\n```"


@pytest.mark.needs("namespaces")
@pytest.mark.real_time
@pytest.mark.parametrize("name", ["word_count", "largest_file"])
async def test_the_solution_of_a_task_folder_has_the_full_reward_and_nothing_has_none(name: str) -> None:
    solution = (FOLDERS / name / "solution" / "solve.sh").read_text()
    session, ended = await played(block(solution), "Done.", task=harbor_task(name), environment="harbor")
    assert ended == "completed"
    assert session.reported["reward"] == 1.0
    assert session.messages[0]["content"].endswith((FOLDERS / name / "instruction.md").read_text().strip())
    assert session.messages[2]["content"] == "[exit code 0]"
    session, _ = await played("Done.", task=harbor_task(name), environment="harbor")
    assert session.reported["reward"] == 0.0


@pytest.mark.needs("namespaces")
@pytest.mark.real_time
async def test_tests_score_what_is_there_when_the_policy_runs_out_of_turns() -> None:
    session, ended = await played(
        block("echo b.txt > answer.txt"),
        task=harbor_task("largest_file"),
        environment="harbor",
        max_turns=1,
    )
    assert ended == "max_turns"
    parts = {name: session.reported[name] for name in ("reward", "named", "removed")}
    assert parts == {"reward": 0.0, "named": 1.0, "removed": 0.0}


@pytest.mark.needs("namespaces")
@pytest.mark.real_time
async def test_a_policy_neither_sees_nor_forges_the_tests_and_reaches_nothing_outside(
    tmp_path: Path,
) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    session, _ = await played(
        block(f"ls /tests /logs; cat {secret}; touch /usr/x; mount -o remount,bind,rw /usr; ls /sys"),
        block("mkdir /logs; ln -s /app/forged /logs/verifier; rm -rf /tests; ln -s /usr /tests"),
        block("mkdir -p /app/forged; echo 1 > /app/forged/reward.json"),
        block("head -c 100000 /dev/zero | tr '\\0' y; exit 3"),
        "Done.",
        task=harbor_task("word_count"),
        environment="harbor",
    )
    told = [message["content"] for message in session.messages if message["role"] == "user"][1:]
    assert "secret" not in told[0].replace(str(secret), "")
    assert "test.sh" not in told[0]
    assert "Read-only file system" in told[0]
    assert "must be superuser" in told[0]
    assert told[3].endswith("[exit code 3]")
    assert len(told[3]) < 9000
    assert session.reported["reward"] == 0.0
    assert not Path("/usr/x").exists()


@pytest.mark.needs("namespaces")
@pytest.mark.real_time
@pytest.mark.parametrize(("args", "reward"), [({}, 0.0), ({"keep_processes": True}, 1.0)])
async def test_what_the_policy_has_started_ends_before_the_tests(
    tmp_path: Path, args: dict[str, Any], reward: float
) -> None:
    runs = (
        "kill -0 $(cat /app/pid) && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt"
    )
    folder = folder_with(tmp_path, "FROM x\nWORKDIR /app", test=runs)
    session, _ = await played(
        block("setsid sleep 1000 >/dev/null 2>&1 & echo $! >pid"),
        "Done.",
        task=make_task(metadata={"folder": str(folder)}),
        environment="harbor",
        **args,
    )
    assert session.reported["reward"] == reward


@pytest.mark.needs("namespaces")
@pytest.mark.real_time
async def test_a_command_that_is_too_long_is_an_invalid_action() -> None:
    session, _ = await played(
        block("#" * 200_000), "Done.", task=harbor_task("word_count"), environment="harbor"
    )
    assert "write a longer one to a file" in session.messages[2]["content"]
    assert session.reported["invalid_actions"] == 1


@pytest.mark.needs("namespaces")
@pytest.mark.real_time
async def test_a_command_without_an_end_is_ended_and_the_policy_reads_that() -> None:
    session = ScriptedSession(
        block("sleep 1000"), "Done.", task=harbor_task("word_count"), tool_timeout_s=0.1
    )
    await played(session=session, environment="harbor")
    assert "ran past 0.1 s and was ended" in session.messages[2]["content"]


def folder_with(tmp_path: Path, dockerfile: str, task: str = "", test: str = "true") -> Path:
    for name in ("environment", "tests"):
        (tmp_path / name).mkdir(exist_ok=True)
    (tmp_path / "task.toml").write_text(task)
    (tmp_path / "instruction.md").write_text("Do it.")
    (tmp_path / "environment" / "Dockerfile").write_text(dockerfile)
    (tmp_path / "environment" / "data.txt").write_text("data")
    (tmp_path / "tests" / "test.sh").write_text(f"#!/bin/bash\n{test}\n")
    return tmp_path


@pytest.mark.needs("namespaces")
@pytest.mark.real_time
async def test_tests_that_write_no_reward_fail_the_attempt(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "FROM x\nWORKDIR /work", test="echo no module named pytest; exit 2")
    session = ScriptedSession("Done.", task=make_task(metadata={"folder": str(folder)}))
    with pytest.raises(NotScored, match=r"ended with 2 and wrote neither .* no module named pytest"):
        await played(session=session, environment="harbor")
    assert session.reported == {}


@pytest.mark.parametrize(
    ("dockerfile", "task", "why"),
    [
        ("FROM x\nRUN echo it's", "", "needs a container engine: its Dockerfile has `RUN echo it's`"),
        ("FROM x\nENV A=$B", "", "its Dockerfile has `ENV A="),
        ("FROM x\nFROM y", "", "its Dockerfile has `FROM y`"),
        ("FROM x\nCOPY --from=y /a /b", "", "its Dockerfile has `COPY --from=y"),
        ("FROM x\nCOPY ../tests /app", "", "copies '../tests', which is not in"),
        ("FROM x", '[environment]\ndocker_image = "python:3.11"', "its image is python:3.11"),
        ("FROM x", '[environment]\nos = "windows"', "its system is windows"),
        ("FROM x", '[verifier]\nenvironment_mode = "separate"', "its verifier has an environment"),
    ],
)
def test_a_task_that_needs_a_container_is_refused_with_the_reason(
    tmp_path: Path, dockerfile: str, task: str, why: str
) -> None:
    folder = folder_with(tmp_path, dockerfile, task)
    with pytest.raises(EnvironmentNotReady, match=why):
        read_image(folder, HarborTask.read(folder))


def test_a_dockerfile_that_copies_and_sets_variables_is_read(tmp_path: Path) -> None:
    text = """# syntax
FROM x
WORKDIR /work
ENV A=1 B='two words'
COPY data.txt ./
COPY \\
  . in/
CMD ["bash"]"""
    folder = folder_with(tmp_path, text)
    image = read_image(folder, HarborTask.read(folder))
    assert image.workdir == "/work"
    assert image.env == {"A": "1", "B": "two words"}
    assert image.copies == (("data.txt", "/work/data.txt"), (".", "/work/in"))
    assert image.name == ""
    assert read_image(folder, HarborTask.read(folder), has_images=True).name == "x"


def test_a_task_with_steps_or_another_format_is_refused(tmp_path: Path) -> None:
    for task, why in (('[[steps]]\nname = "a"', "has steps"), ("[agent", "cannot be read")):
        folder = folder_with(tmp_path, "FROM x", task)
        with pytest.raises(AgentLoopError, match=why):
            HarborTask.read(folder)


@pytest.mark.parametrize("content", [b"", b"nan", b"one", b"1e309"])
def test_a_reward_that_is_no_finite_number_fails(content: bytes) -> None:
    with pytest.raises(AgentLoopError):
        read_rewards(content, "reward.txt")


@pytest.mark.parametrize("content", [b"", b'{"a": 1, "b": 2}', b'{"reward": "1"}', b"[1]", b"{}"])
def test_a_reward_file_of_another_form_fails(content: bytes) -> None:
    with pytest.raises(AgentLoopError):
        read_rewards(content, "reward.json")


def test_variables_of_a_task_come_from_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARBOR_TEST_KEY", "abc")
    assert resolved("${HARBOR_TEST_KEY}/${HARBOR_TEST_NONE:-else}") == "abc/else"
    with pytest.raises(EnvironmentNotReady, match="HARBOR_TEST_NONE"):
        resolved("${HARBOR_TEST_NONE}")
