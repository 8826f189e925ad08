"""Agents that know nothing of training, as agent loops."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from agent_loops.agent_program import OutputTail, last_words, without_proxy
from agent_loops.openai_agent import AgentAPI, OpenAIAgentLoop
from async_rl.cli.inspection.try_out import rollout
from async_rl.errors import (
    AgentLoopError,
    ConfigError,
    EngineError,
    PromptTooLong,
    RequestRefused,
    ToolBroken,
)
from async_rl.runtime.supervision import Nursery
from async_rl.store.journal import Journal
from async_rl.types import Task
from tests.support.journals import continue_journals, reopen_entry
from tests.support.scripted import ScriptedEngine
from tests.support.scripted_session import make_task
from tests.support.talk import lines, talking
from tests.support.writer import writing

pytestmark = pytest.mark.real_time

HERE = __name__
EXAMPLE = Path(__file__).parents[2] / "examples" / "openai_agent"


async def two_turns(task: Task, api: AgentAPI) -> str:
    messages: list[Any] = list(task.messages)
    for _ in range(2):
        answer = await api.client.chat.completions.create(model=api.model, messages=messages)
        messages += [answer.choices[0].message, {"role": "user", "content": "Sure?"}]
    return "not used"


def in_a_thread(task: Task, api: AgentAPI) -> None:
    assert threading.current_thread() is not threading.main_thread()
    api.sync_client.chat.completions.create(model=api.model, messages=task.messages)


async def asks_nothing(task: Task, api: AgentAPI) -> None: ...


async def with_a_client_of_its_own(task: Task, api: AgentAPI) -> None:
    async with aiohttp.ClientSession(trust_env=True, raise_for_status=True) as client:
        await client.post(f"{api.session_url}/chat/completions", json={"messages": task.messages})


async def too_much(task: Task, api: AgentAPI) -> None:
    messages: list[Any] = list(task.messages)
    while True:
        answer = await api.client.chat.completions.create(model=api.model, messages=messages)
        messages += [answer.choices[0].message, {"role": "user", "content": "x" * 5000}]


LONG = "x" * 600_000


async def ignores_refusals(task: Task, api: AgentAPI) -> None:
    """Say each message, behind those that were answered."""
    said: list[Any] = []
    for message in task.messages:
        with suppress(openai.BadRequestError):
            answer = await api.client.chat.completions.create(model=api.model, messages=[*said, message])
            said += [message, answer.choices[0].message]


async def fails_after_a_shorter_one(task: Task, api: AgentAPI) -> None:
    """Is refused for its context, continues with fewer messages, and fails for another reason."""
    for text in ("x" * 9000, "In short?"):
        messages: list[Any] = [{"role": "user", "content": text}]
        with suppress(openai.BadRequestError):
            await api.client.chat.completions.create(model=api.model, messages=messages)
    raise KeyError("the database is gone")


async def quotes_its_url(task: Task, api: AgentAPI) -> None:
    raise ValueError(f"no answer of {api.session_url}", 404)


async def quotes_its_url_in_a_group(task: Task, api: AgentAPI) -> None:
    raise ExceptionGroup("two", [ValueError(f"no answer of {api.session_url}"), OSError(2, api.api_key)])


async def fails_because_of_it(task: Task, api: AgentAPI) -> None:
    url = f"{api.session_url}/chat/completions"
    async with aiohttp.ClientSession() as client, client.post(url, json={"messages": []}) as response:
        try:
            response.raise_for_status()
        except aiohttp.ClientResponseError as error:
            raise ValueError("no answer") from error


class Hanging:
    """Asks, and never comes back."""

    began: asyncio.Event

    @classmethod
    async def agent(cls, task: Task, api: AgentAPI) -> None:
        await api.client.chat.completions.create(model=api.model, messages=task.messages)
        cls.began.set()
        await asyncio.Future()


async def play(loop: OpenAIAgentLoop, *answers: str, **engine: Any) -> tuple[Any, Any]:
    bench, talker = talking(lines(*answers), **engine)
    reason = await loop.run(make_task(), bench.session)
    return bench, (reason, talker)


async def test_an_agents_turns_are_the_trajectory():
    bench, (reason, _) = await play(OpenAIAgentLoop(agent=f"{HERE}:two_turns"), "4", "Yes.")
    assert reason is None
    assert [m["content"] for m in bench.session.messages] == ["What is 2 + 2?", "4", "Sure?", "Yes."]
    trajectory = await bench.finish()
    assert trajectory.outcome.num_turns == 2
    assert trajectory.num_sampled_tokens == len("4Yes.") + 2


async def test_answers_are_given_again_when_the_agent_runs_again_after_a_restart(tmp_path: Path):
    loop = OpenAIAgentLoop(agent=f"{HERE}:two_turns")
    journal = Journal(tmp_path / "000001")
    before, _ = await play(loop, "4", "Yes.", entry=journal.open_entry("0" * 32))
    journal.write_entries()
    journal.close()
    journal, left = continue_journals(tmp_path, ["0" * 32])
    after, (_, talker) = await play(loop, entry=reopen_entry(journal, left["0" * 32]))
    journal.close()
    assert talker.prompts == []
    assert after.session.messages == before.session.messages


async def test_a_sync_agent_runs_in_a_thread():
    bench, _ = await play(OpenAIAgentLoop(agent=f"{HERE}:in_a_thread"), "4")
    assert bench.session.last_turn.text == "4"


async def test_the_trajectory_ends_as_it_is_when_the_agent_gives_up_at_a_full_context():
    loop = OpenAIAgentLoop(agent=f"{HERE}:too_much")
    bench, (reason, _) = await play(loop, "4", "Yes.")
    assert reason == "length"
    assert bench.session.last_turn.text == "Yes."


@pytest.mark.parametrize("max_body_bytes", [1 << 20, 100_000])
@pytest.mark.parametrize(("texts", "reason"), [([LONG], "length"), ([LONG, "In short?"], "completed")])
async def test_the_trajectory_ends_alike_when_the_agent_ignores_that_its_context_is_full(
    max_body_bytes: int, texts: list[str], reason: str
):
    bench, _ = talking(lines("4", "Yes."))
    loop = OpenAIAgentLoop(agent=f"{HERE}:ignores_refusals", max_body_bytes=max_body_bytes)
    task = make_task(messages=[{"role": "user", "content": text} for text in ("?", *texts)])
    bench.session.end_session(await loop.run(task, bench.session))
    assert bench.session.stop_reason == reason


async def test_an_agent_fails_although_an_earlier_request_of_it_was_too_long():
    """It has gone on since, so that it does not end for its budget."""
    loop = OpenAIAgentLoop(agent=f"{HERE}:fails_after_a_shorter_one")
    with pytest.raises(KeyError, match="the database is gone"):
        await play(loop, "Short.")


async def test_a_task_is_too_long_when_nothing_could_be_asked():
    bench, _ = talking(lines("never said"))
    task = make_task(messages=[{"role": "user", "content": "x" * 9000}])
    with pytest.raises(PromptTooLong):
        await OpenAIAgentLoop(agent=f"{HERE}:two_turns").run(task, bench.session)


async def test_the_engines_error_ends_the_trajectory_when_the_policy_cannot_answer():
    bench, _ = talking(lines("never said"))
    bench.pool.quarantine_engine("engine-0", EngineError("gone"))
    bench.pool.add_engine(ScriptedEngine("engine-1", [lambda r: [RequestRefused("too odd")]]))
    bench.pool.serve_engine("engine-1", 0)
    with pytest.raises(RequestRefused, match="too odd"):
        await OpenAIAgentLoop(agent=f"{HERE}:two_turns").run(make_task(), bench.session)


async def test_the_server_is_gone_when_the_trajectory_was_cancelled(monkeypatch: pytest.MonkeyPatch):
    Hanging.began = asyncio.Event()
    bench, _ = talking(lines("4"))
    loop = OpenAIAgentLoop(agent=f"{HERE}:Hanging.agent")
    async with Nursery() as nursery:
        running = nursery.start_task("trajectory", loop.run(make_task(), bench.session))
        await Hanging.began.wait()
        running.cancel()
    assert not loop.endpoint.is_running
    assert (await bench.finish()).num_sampled_tokens == 2


PROGRAM = """
import json, os, sys
import openai
task = json.load(sys.stdin)
assert "answer" not in task
leaked = [name for name in os.environ if name.startswith(("ASYNC_RL_", "RAY_"))]
client = openai.OpenAI()
said = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=task["messages"])
sys.exit(f"{said.choices[0].message.content} {leaked}")
"""


async def test_a_program_is_an_agent_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ASYNC_RL_ENGINE_API_KEY", "secret")
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    loop = OpenAIAgentLoop(command=[sys.executable, "-c", PROGRAM])
    with pytest.raises(AgentLoopError, match=r"ended with 1: 4 \['ASYNC_RL_STARTED_BY'\]"):
        await play(loop, "4")


ASKS_AND_FAILS = """
import os, sys, urllib.error, urllib.request
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/{path}",
    data=b'{{"messages": [{{"role": "user", "content": "Hi"}}]}}',
    headers={{"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}},
)
print("a long report " * 2000)
try:
    urllib.request.urlopen(request).read()
except urllib.error.HTTPError as error:
    pass
{then}
"""


def asking(path: str, then: str, **arguments: Any) -> OpenAIAgentLoop:
    program = ASKS_AND_FAILS.format(path=path, then=then)
    return OpenAIAgentLoop(command=[sys.executable, "-c", program], **arguments)


async def test_the_exit_code_and_the_endpoints_last_error_are_shown_when_a_program_fails():
    with pytest.raises(AgentLoopError) as caught:
        await play(asking("embeddings", "eval('f(')"))
    assert str(caught.value) == (
        f"agent {Path(sys.executable).name!r} ended with 1: SyntaxError: '(' was never closed; the "
        "endpoint's last error: 404, POST /v1/embeddings is not supported; there are GET /v1/models, "
        "POST /v1/chat/completions, /v1/responses, /v1/messages and /v1/messages/count_tokens"
    )


SIZE, KEY = 1 << 16, "sk-1-abcdef"


def kept(output: bytes, step: int = 991) -> list[str]:
    """The lines of an output that are kept when it comes in pieces."""
    tail = OutputTail()
    for begin in range(0, len(output), step):
        tail.add(output[begin : begin + step])
    return tail.lines(KEY)


FRAMES = 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n    f()\n    ^^^\n'


@pytest.mark.parametrize(
    ("stderr", "shown"),
    [
        (f"{FRAMES}ValueError: no plan\n", "ValueError: no plan"),
        ("  File \"a.py\", line 1\n    f(\n     ^\nSyntaxError: '(' was ...\n", "SyntaxError: '(' was ..."),
        (
            "  + Exception Group Traceback (most recent call last):\n  |   File 'a.py'\n  | ExceptionGroup:\n"
            "  +-+---------------- 1 ----------------\n    | TypeError: x\n    +--------------------\n",
            "TypeError: x",
        ),
        (
            f"{FRAMES}pydantic.ValidationError: 1 error for Plan\nstep\n  Field required\n",
            "for Plan step Field",
        ),
        ("a.js:1\nthrow new Error('x')\n^\n\nError: x\n    at main (a.js:1)\n", "Error: x at main (a.js:1)"),
        (f"{FRAMES}OSError: seen\n" + "retrying\n" * 9 + "no task\n", "OSError: seen .*last line: no task"),
        ("\x1b[31mValueError: red\x1b[0m\n", "ValueError: red"),
        (
            f"{FRAMES}OSError: real\nException ignored while closing:\n{FRAMES}KeyError: x\n"
            f"\nDuring handling of the above exception, another:\n\n{FRAMES}TypeError: y\nbye\n",
            "^OSError: real bye$",
        ),
        (
            "java.lang.Odd: x\n" + "\tat a.b(c)\n" * 9 + "Caused by: y.Gone: z\n\tat d\n",
            "Caused by: y.Gone: z",
        ),
        (
            "thread 'main' panicked at a.rs:2:\nboom\n" + "  1: core::f\n" * 9,
            "thread 'main' panicked at a.rs:2: boom",
        ),
        (f"{FRAMES}ValueError: {'z' * 100_000}\n", "^ValueError: zzz"),
        ("", "the last of many lines"),
    ],
)
def test_the_last_exception_is_shown_when_a_program_fails(stderr: str, shown: str):
    stdout = b"a long report\n" * 2000 + b"the last of many lines\n"
    said = last_words(kept(stdout), kept(stderr.encode()))
    assert shown in said or re.search(shown, said)
    assert "^^^" not in said


def test_no_part_of_the_key_is_shown_when_the_end_of_the_output_begins_inside_it():
    """It begins with the first 256 bytes of a line, which may end inside the key as well."""
    for cut in range(len(KEY) + 1):
        for before, after in ((0, SIZE - cut), (300, SIZE - cut), (256 - cut, SIZE)):
            output = f"{'x' * before}{KEY}{'x' * after}".encode()
            for step in (991, SIZE):
                assert set(last_words([], kept(output, step))) <= {*"<key> … x"}


async def test_the_endpoints_last_error_is_shown_when_an_agent_was_never_answered_without_its_key():
    program = ASKS_AND_FAILS.format(path="embeddings", then="").replace(
        'os.environ["OPENAI_BASE_URL"]',
        'os.environ["OPENAI_BASE_URL"].replace("/v1", "/s/" + os.environ["OPENAI_API_KEY"])',
    )
    with pytest.raises(AgentLoopError) as caught:
        await play(OpenAIAgentLoop(command=[sys.executable, "-c", program]))
    assert "no request of it was answered: agent" in str(caught.value)
    assert "last error: 404, POST /s/<key>/embeddings is not supported" in str(caught.value)
    with pytest.raises(AgentLoopError, match="no request of it was answered: it sent none"):
        await play(OpenAIAgentLoop(agent=f"{HERE}:asks_nothing"))


async def test_a_time_limit_shows_what_the_program_and_the_endpoint_said(tmp_path: Path):
    os.mkfifo(tmp_path / "told")
    wait = f"open({str(tmp_path / 'told')!r}, 'w')"
    then = f"print('OSError: again', file=sys.stderr, flush=True)\n{wait}\n{wait}"
    bench, _ = talking(lines())
    async with Nursery() as nursery:
        running = nursery.start_task("trajectory", asking("embeddings", then).run(make_task(), bench.session))
        (await asyncio.to_thread(open, tmp_path / "told", "rb")).close()
        running.cancel()
    shown = r"was still running: OSError: again; the endpoint's last error: 404, POST /v1/embeddings"
    assert re.search(shown, bench.session.status)


async def test_a_nonzero_exit_is_a_failed_agent_when_the_loop_is_to_score_it():
    loop = asking("chat/completions", "sys.exit('gave up')", nonzero_exit="zero")
    bench, (reason, _) = await play(loop, "4")
    assert reason == "failed"
    bench.session.end_session(reason)
    assert bench.session.completion.stop_reason == "failed"


@pytest.mark.parametrize("nonzero_exit", ["fail", "zero", "score"])
async def test_a_tool_is_broken_when_a_program_says_so(nonzero_exit: str):
    loop = asking("chat/completions", "sys.exit(os.EX_TEMPFAIL)", nonzero_exit=nonzero_exit)
    with pytest.raises(ToolBroken, match="ended with 75"):
        await play(loop, "4")


@pytest.mark.parametrize(
    ("path", "then"), [("embeddings", "sys.exit(1)"), ("chat/completions", "os.kill(os.getpid(), 9)")]
)
async def test_the_attempt_fails_when_a_program_asked_nothing_or_was_killed(path: str, then: str):
    with pytest.raises(AgentLoopError):
        await play(asking(path, then, nonzero_exit="zero"), "4")


@pytest.mark.parametrize(
    ("given", "exempt"),
    [
        ({}, "127.0.0.1,localhost,::1,node7"),
        ({"no_proxy": "a, localhost", "NO_PROXY": ".b,a"}, "a,localhost,.b,127.0.0.1,::1,node7"),
        ({"NO_PROXY": "*"}, "*"),
    ],
)
def test_the_endpoint_is_exempt_from_proxies_beside_the_users_hosts(given: dict[str, str], exempt: str):
    assert without_proxy(given, "http://node7:80/v1") == {"no_proxy": exempt, "NO_PROXY": exempt}


async def test_an_agents_own_client_reaches_the_endpoint_when_the_environment_names_a_proxy(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):  # which the loop extends
        monkeypatch.setenv(name, "")
    async with OpenAIAgentLoop(agent=f"{HERE}:with_a_client_of_its_own") as loop:
        bench, _ = await play(loop, "4")
    assert bench.session.num_turns == 1


LEAVES_A_SESSION = """
import subprocess, sys
subprocess.Popen(["sleep", "90"], start_new_session=True)  # it inherits stdout, as browsers and servers do
sys.exit("it is done")
"""


async def test_the_trajectory_ends_with_a_program_although_another_session_holds_its_output():
    loop = OpenAIAgentLoop(command=[sys.executable, "-c", LEAVES_A_SESSION])
    async with asyncio.timeout(60):
        with pytest.raises(AgentLoopError, match="ended with 1: it is done"):
            await play(loop)


async def test_a_program_is_waited_for_when_it_has_closed_its_output():
    loop = OpenAIAgentLoop(command=["sh", "-c", "echo done; exec >&- 2>&-; sleep 0.2; exit 7"])
    with pytest.raises(AgentLoopError, match="ended with 7: done"):
        await play(loop)


async def test_a_program_and_its_children_are_killed_when_the_trajectory_is_cancelled(tmp_path):
    os.mkfifo(tmp_path / "alive")
    # Both hold the pipe open for writing: its reader sees the end when both are gone.
    script = f"sleep 1000 > {tmp_path}/alive & exec sleep 1000 > {tmp_path}/alive"
    loop = OpenAIAgentLoop(command=["sh", "-c", script])
    bench, _ = talking(lines())
    async with Nursery() as nursery:
        running = nursery.start_task("trajectory", loop.run(make_task(), bench.session))
        pipe = await asyncio.to_thread(open, tmp_path / "alive", "rb")
        running.cancel()
    with pipe:
        assert await asyncio.to_thread(pipe.read) == b""


async def test_an_error_hides_the_key_when_a_program_prints_it():
    loop = OpenAIAgentLoop(command=["sh", "-c", "echo $OPENAI_API_KEY; exit 1"])
    with pytest.raises(AgentLoopError, match="ended with 1: <key>"):
        await play(loop)


@pytest.mark.parametrize(
    ("agent", "kind", "words", "shown"),
    [
        ("quotes_its_url", ValueError, r"no answer of http\S+/<key>", "', 404)"),
        ("quotes_its_url_in_a_group", AgentLoopError, "raised ExceptionGroup: two", "/<key>"),
        ("fails_because_of_it", AgentLoopError, "raised ValueError: no answer", "raise_for_status()"),
    ],
)
async def test_an_error_hides_the_key_when_it_quotes_a_request(
    agent: str, kind: type[Exception], words: str, shown: str
):
    with pytest.raises(kind, match=words) as caught:
        await play(OpenAIAgentLoop(agent=f"{HERE}:{agent}"), "Hello.")
    told = "".join(traceback.format_exception(caught.value))
    assert "sk-" not in told
    assert shown in told, "the agent's own lines are shown"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({}, "either agent .* or command"),
        ({"agent": f"{HERE}:two_turns", "command": ["x"]}, "either agent .* or command"),
        ({"command": "python agent.py"}, "expected a list"),
        ({"command": ["no-such-program"]}, "there is no program 'no-such-program'"),
        ({"agent": f"{HERE}:two_turnz"}, "did you mean 'two_turns'"),
        ({"command": ["sh"], "nonzero_exit": "0"}, "nonzero_exit is '0'; expected fail, or for a command z"),
        (
            {"agent": f"{HERE}:two_turns", "nonzero_exit": "zero"},
            "expected fail, or for a command zero or score",
        ),
        ({"agent": f"{HERE}:two_turns", "port": True}, r"`int`, got `bool` - at `\$.port`"),
        ({"agent": f"{HERE}:two_turns", "max_body_bytes": 0}, r"`int` >= 1 - at `\$.max_body_bytes`"),
        ({"agent": f"{HERE}:two_turns", "opens_thought": "no"}, r"`bool`, got `str` - at `\$.opens_thought`"),
    ],
)
def test_config_error_when_the_loops_arguments_cannot_work(arguments: dict[str, Any], error: str):
    with pytest.raises(ConfigError, match=error):
        OpenAIAgentLoop(**arguments)


async def with_a_framework(task: Task, api: AgentAPI) -> None:
    """A weather agent as its users write it, with openai-agents."""
    import agents

    agents.set_tracing_disabled(True)

    @agents.function_tool
    def weather(city: str) -> str:
        """Tell the weather.

        Args:
            city: Where.
        """
        return f"{city}: rain"

    model = agents.OpenAIChatCompletionsModel(model=api.model, openai_client=api.client)
    helper = agents.Agent(name="Translator", instructions="Translate into German.", model=model)
    agent = agents.Agent(
        name="Weather",
        instructions="Use the tools.",
        model=model,
        tools=[weather, helper.as_tool("translate", "Translate a text.")],
        model_settings=agents.ModelSettings(temperature=0.2),
    )
    answer = agents.Runner.run_streamed(agent, task.messages[0]["content"])
    async for _ in answer.stream_events():
        pass
    assert answer.final_output == "In Oslo und Rom regnet es."


def tool_call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def weather_policy(prompt: str) -> str:
    """Call two tools side by side, have a sub-agent translate, and answer."""
    if "Translate into German." in prompt:
        return "In Oslo und Rom regnet es."
    if "regnet" in prompt:
        return "In Oslo und Rom regnet es."
    if "Rome: rain" in prompt:
        return "Now in German.\n" + tool_call("translate", input="Rain.")
    return tool_call("weather", city="Oslo") + "\n" + tool_call("weather", city="Rome")


async def test_an_agent_of_a_framework_with_tools_and_a_sub_agent_trains_all_its_conversations():
    bench, talker = talking(weather_policy, max_branches=1)
    await OpenAIAgentLoop(agent=f"{HERE}:with_a_framework").run(make_task(), bench.session)
    main, translator = bench.session.tree
    assert [message["role"] for message in main.messages] == [
        *("system", "user", "assistant", "tool", "tool", "assistant", "tool", "assistant")
    ]
    assert [message["role"] for message in translator.messages] == ["system", "user", "assistant"]
    assert len(talker.prompts) == main.num_turns + translator.num_turns == 4
    assert main.completion.num_tool_calls == 3
    assert translator.completion.text == "In Oslo und Rom regnet es."
    for session in bench.session.tree:
        trajectory = await session.finish_trajectory("completed", {"reward": 1.0})
        assert trajectory.trace.valid.all()


def calculating_policy(conversation: str) -> str:
    expression = re.findall(r"What is (.*)\?", conversation)[-1]
    results = re.findall(r"<tool_response>\n(.*)\n</tool_response>", conversation)
    return f"{expression} = {results[-1]}." if results else tool_call("calculator", expression=expression)


@pytest.mark.parametrize("kind", ["function", "program"])
def test_the_example_is_rewarded_when_the_policy_knows_its_calculator(
    calculator: Path, kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(EXAMPLE.parents[1])
    overrides = [f"model.path={calculator / 'model'}", f"data.path={calculator / 'data' / 'tasks.jsonl'}"]
    if kind == "program":  # it has no tool
        overrides.append(f"rollout.agent_loop_args={{command: [{sys.executable}, {EXAMPLE / 'agent.py'}]}}")
    code = rollout(
        EXAMPLE / "config.yaml", overrides, number=2, as_json=True, open_engines=writing(calculating_policy)
    )
    portraits = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert code == 0
    assert [p["reward"] for p in portraits] == ([1.0, 1.0] if kind == "function" else [0.0, 0.0])
    turns = ["prompt", "policy"] if kind == "program" else ["prompt", "policy", "tool", "policy"]
    assert [[passage["role"] for passage in p["passages"]] for p in portraits] == [turns, turns]
