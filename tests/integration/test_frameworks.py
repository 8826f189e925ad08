"""Agent frameworks as their users write them, unmodified: each is the program of a trajectory.

```
 tests/requirements/NAME.txt ──► interpreter ──► tests/support/frameworks/PROGRAM ──► endpoint ──► script
```

The programs ask two questions, of which the first needs a tool.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent_loops.openai_agent import OpenAIAgentLoop
from agent_loops.testing import make_task
from async_rl.errors import AgentLoopError
from async_rl.types import Sampled, Trajectory
from tests.support.package_environments import python_with
from tests.support.sessions import Bench
from tests.support.talk import lines, talking

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]  # packages are installed, programs import them

PROGRAMS = Path(__file__).parents[1] / "support" / "frameworks"


def call(tool: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


THOUGHT = "<think>\nWhere?\n</think>\n\n"
CALLS = f"{call('weather', city='Oslo')}\n{call('weather', city='Rome')}"
ASKED = "<|im_start|>user\nWeather in Oslo and Rome?<|im_end|>\n<|im_start|>assistant\n"
TOLD = (
    "<|im_start|>user\n<tool_response>\nOslo: rain\n</tool_response>\n<tool_response>\nRome: rain\n"
    "</tool_response><|im_end|>\n<|im_start|>assistant\n"
)
SAYS = (f"{THOUGHT}I look.\n{CALLS}", "Rain in both.", "You are welcome.")
WITH_TOOL = f"{ASKED}{SAYS[0]}<|im_end|>\n{TOLD}{SAYS[1]}<|im_end|>"
WHOLE = f"{WITH_TOOL}\n<|im_start|>user\nThanks.<|im_end|>\n<|im_start|>assistant\n{SAYS[2]}<|im_end|>"


def _smolagents(*steps: tuple[str, str, str]) -> dict[str, Any]:
    """Each step of smolagents begins another conversation: it writes its earlier actions as text."""
    said: list[str] = []
    conversations = []
    text = "<|im_start|>user\nNew task:\nWeather in Oslo and Rome?<|im_end|>\n"
    for says, rewritten, observed in steps:
        conversations.append(f"{text}<|im_start|>assistant\n{says}<|im_end|>")
        text += f"<|im_start|>assistant\n{rewritten}<|im_end|>\n"
        text += f"<|im_start|>user\nObservation:\n{observed}<|im_end|>\n"
        said.append(says)
    return {"says": tuple(said), "conversations": tuple(conversations)}


def _written(*calls: tuple[str, str, Any]) -> str:
    """Return calls as smolagents writes them into its history."""
    written = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, name, arguments in calls
    ]
    return f"Calling tools:\n{written}"


def _code(code: str) -> str:
    return f"Thought: So.\n<code>\n{code}\n</code>"


LOOK, TELL, END = "print(weather('Oslo'))", "final_answer('Rain.')", "final_answer('Bye.')"
SMOLAGENTS = _smolagents(
    (
        SAYS[0],
        "I look.\n"
        + _written(("call_1_0", "weather", {"city": "Oslo"}), ("call_1_1", "weather", {"city": "Rome"})),
        "Oslo: rain\nRome: rain",
    ),
    (
        call("final_answer", answer="Rain."),
        "\n" + _written(("call_2_0", "final_answer", {"answer": "Rain."})),
        "Rain.\nNew task:\nThanks.",
    ),
    (call("final_answer", answer="Bye."), "", ""),
)
SMOLAGENTS_CODE = _smolagents(
    (
        THOUGHT + _code(LOOK),
        f"{_code(LOOK)}\n" + _written(("call_1", "python_interpreter", LOOK)),
        "Execution logs:\nOslo: rain\nLast output from code snippet:\nNone",
    ),
    (
        _code(TELL),
        f"{_code(TELL)}\n" + _written(("call_2", "python_interpreter", TELL)),
        "Execution logs:\nLast output from code snippet:\nRain.\nNew task:\nThanks.",
    ),
    (_code(END), "", ""),
)

_FIELDS = (
    "Respond with the corresponding output fields, starting with the field `[[ ## next_thought ## ]]`, then "
    "`[[ ## next_tool_name ## ]]` (must be formatted as a valid Python Literal['weather', 'finish']), then "
    "`[[ ## next_tool_args ## ]]` (must be formatted as a valid Python dict[str, Any]), and then ending with "
    "the marker for `[[ ## completed ## ]]`."
)
_LAST_FIELDS = (
    "Respond with the corresponding output fields, starting with the field `[[ ## reasoning ## ]]`, then "
    "`[[ ## answer ## ]]`, and then ending with the marker for `[[ ## completed ## ]]`."
)


def _dspy_step(thought: str, tool: str, arguments: str) -> str:
    return (
        f"[[ ## next_thought ## ]]\n{thought}\n\n[[ ## next_tool_name ## ]]\n{tool}\n\n"
        f"[[ ## next_tool_args ## ]]\n{arguments}\n\n[[ ## completed ## ]]"
    )


def _dspy_taken(number: int, thought: str, tool: str, arguments: str, observed: str) -> str:
    return (
        f"[[ ## thought_{number} ## ]]\n{thought}\n\n[[ ## tool_name_{number} ## ]]\n{tool}\n\n"
        f"[[ ## tool_args_{number} ## ]]\n{arguments}\n\n[[ ## observation_{number} ## ]]\n{observed}\n\n"
    )


def _dspy() -> dict[str, Any]:
    """Each call of DSPy is a prompt of its own, with the earlier steps in one message."""
    asked = "<|im_start|>user\n[[ ## question ## ]]\nWeather in Oslo and Rome?\n\n[[ ## trajectory ## ]]\n"
    look, know = ("I look.", "weather", '{"city": "Oslo"}'), ("I know.", "finish", "{}")
    answer = "[[ ## reasoning ## ]]\nI looked.\n\n[[ ## answer ## ]]\nRain.\n\n[[ ## completed ## ]]"
    says = _dspy_step(*look), _dspy_step(*know), answer
    taken = _dspy_taken(0, *look, "Oslo: rain")
    prompts = (
        f"\n\n{_FIELDS}",
        f"{taken}{_FIELDS}",
        f"{taken}{_dspy_taken(1, *know, 'Completed.')}{_LAST_FIELDS}",
    )
    return {
        "says": says,
        "conversations": tuple(
            f"{asked}{prompt}<|im_end|>\n<|im_start|>assistant\n{said}<|im_end|>"
            for prompt, said in zip(prompts, says, strict=True)
        ),
    }


def _crewai_task(description: str, context: str = "") -> str:
    return (
        f"<|im_start|>user\n\nCurrent Task: {description}\n\nThis is the expected criteria for your final "
        "answer: A sentence\nyou MUST return the actual complete content as the final answer, not a summary."
        f"{context}<|im_end|>\n<|im_start|>assistant\n"
    )


CREWAI = (
    f"{_crewai_task('Weather in Oslo and Rome?')}{SAYS[0]}<|im_end|>\n{TOLD}{SAYS[1]}<|im_end|>",
    _crewai_task("Thanks.", f"\n\nThis is the context you're working with:\n{SAYS[1]}")
    + f"{SAYS[2]}<|im_end|>",
)


class Framework(msgspec.Struct, frozen=True, kw_only=True):
    """A program, and what becomes of its requests."""

    program: str
    """A file, with arguments."""
    environment: str
    """Names the packages; `node` are those of `package.json`."""
    says: tuple[str, ...] = SAYS
    """What the policy says."""
    conversations: tuple[str, ...] = (WHOLE,)
    """The tokens of each conversation behind its system message, as text."""
    system: str = "Be brief."
    """How the system message begins."""


FRAMEWORKS = {
    "openai-agents": Framework(program="openai_agents.py", environment="openai_agents"),
    "anthropic": Framework(program="anthropic_sdk.py", environment="anthropic_sdk"),
    "langgraph": Framework(program="langgraph_openai.py", environment="langgraph"),
    "pydantic-ai": Framework(program="pydantic_ai_agent.py openai", environment="pydantic_ai"),
    "pydantic-ai anthropic": Framework(program="pydantic_ai_agent.py anthropic", environment="pydantic_ai"),
    "smolagents": Framework(
        program="smolagents_agent.py ToolCallingAgent",
        environment="smolagents",
        system="You are an expert assistant who can solve any task using tool calls.",
        **SMOLAGENTS,
    ),
    "smolagents code": Framework(
        program="smolagents_agent.py CodeAgent",
        environment="smolagents",
        system="You are an expert assistant who can solve any task using code blobs.",
        **SMOLAGENTS_CODE,
    ),
    "autogen": Framework(program="autogen_agent.py", environment="autogen"),
    "llama-index": Framework(program="llama_index_agent.py", environment="llama_index"),
    "dspy": Framework(
        program="dspy_react.py", environment="dspy", system="Your input fields are:", **_dspy()
    ),
    "crewai": Framework(
        program="crewai_crew.py",
        environment="crewai",
        system="You are Forecaster. You are brief.",
        conversations=CREWAI,
    ),
    "vercel": Framework(program="vercel_ai.mjs openai", environment="node"),
    "vercel anthropic": Framework(program="vercel_ai.mjs anthropic", environment="node"),
}


def each_of(*names: str) -> pytest.MarkDecorator:
    """One case for each of these frameworks, by name."""
    needs = {name: "npm" if FRAMEWORKS[name].environment == "node" else "pypi" for name in names}
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=pytest.mark.needs(need)) for name, need in needs.items()]
    )


APPENDING = [name for name, each in FRAMEWORKS.items() if each.conversations == (WHOLE,)]


@pytest.fixture(autouse=True)
def without_internet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep LiteLLM from fetching prices, and CrewAI from reporting."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    monkeypatch.setenv("CREWAI_DISABLE_TELEMETRY", "true")


@pytest.fixture(scope="session")
def command_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Framework], list[str]]:
    """Returns the command of a framework's program, whose packages are installed."""
    installed: list[Path] = []

    def command(framework: Framework) -> list[str]:
        file, *arguments = framework.program.split()
        if framework.environment != "node":
            return [str(python_with(framework.environment)), str(PROGRAMS / file), *arguments]
        if not installed:
            installed.append(_with_node_modules(tmp_path_factory.mktemp("node")))
        return ["node", str(installed[0] / file), *arguments]

    return command


def _with_node_modules(folder: Path) -> Path:
    """Copy the JavaScript programs into a folder with their packages, where Node.js looks for them."""
    for path in (*PROGRAMS.glob("*.mjs"), *PROGRAMS.glob("package*.json")):
        shutil.copy(path, folder)
    subprocess.run(["npm", "ci", "--no-audit", "--no-fund", "--silent"], cwd=folder, check=True)
    return folder


async def played(
    command: list[str], says: tuple[str, ...], then: str = "Thanks.", **limits: int
) -> tuple[Bench, str | None]:
    """Run a program whose task has two questions; return the reason with which it stopped."""
    bench, _ = talking(lines(*says), **limits)
    questions = [{"role": "user", "content": text} for text in ("Weather in Oslo and Rome?", then)]
    # Its tool-calling agent always sends `tool_choice: required`.
    forces = any("smolagents" in word for word in command)
    loop = OpenAIAgentLoop(command=command, constraints="ignore" if forces else "refuse")
    return bench, await loop.run(make_task(messages=questions), bench.session)


async def trajectories(bench: Bench) -> list[Trajectory]:
    return [await s.finish_trajectory("completed", {"reward": 1.0}) for s in bench.session.tree]


def text_of(bench: Bench, token_ids: Any) -> str:
    return str(bench.chat.tokenizer.decode(token_ids))


def turns_of(bench: Bench, trajectory: Trajectory) -> list[str]:
    """Return the texts that the policy has sampled, turn by turn."""
    sampled = [each.token_ids for each in trajectory.segments if isinstance(each, Sampled)]
    return [text_of(bench, token_ids).removesuffix("<|im_end|>") for token_ids in sampled]


def requests(bench: Bench) -> dict[str, float]:
    results = ("answered", "another", "repeated", "refused")
    counted = {result: bench.counted("openai_requests_total", result=result) for result in results}
    return {result: number for result, number in counted.items() if number}


@each_of(*FRAMEWORKS)
async def test_a_frameworks_requests_are_exactly_its_trajectory(
    name: str, command_of: Callable[[Framework], list[str]]
):
    framework = FRAMEWORKS[name]
    others = len(framework.conversations) - 1
    bench, reason = await played(
        command_of(framework), framework.says, max_branches=others, max_context_tokens=40_000
    )
    assert reason is None
    assert requests(bench).get("another", 0) == others
    assert sum(requests(bench).values()) == len(framework.says)
    kept = await trajectories(bench)
    assert [turn for each in kept for turn in turns_of(bench, each)] == [*framework.says]
    texts = [text_of(bench, each.token_ids) for each in kept]
    for text in texts:
        assert text.startswith(f"<|im_start|>system\n{framework.system}")
    assert tuple(text.partition("<|im_end|>\n")[2] for text in texts) == framework.conversations


@each_of(*APPENDING)
async def test_a_full_context_ends_a_frameworks_trajectory_as_it_is(
    name: str, command_of: Callable[[Framework], list[str]]
):
    bench, reason = await played(command_of(FRAMEWORKS[name]), SAYS[:2], then="x" * 9000)
    assert reason == "length"
    assert requests(bench)["answered"] == 3
    (trajectory,) = await trajectories(bench)
    assert turns_of(bench, trajectory) == [*SAYS[:2]]
    assert text_of(bench, trajectory.token_ids).partition("<|im_end|>\n")[2] == WITH_TOOL


@each_of("smolagents", "smolagents code")
async def test_a_framework_that_rewrites_its_history_is_told_to_raise_max_branches(
    name: str, command_of: Callable[[Framework], list[str]]
):
    framework = FRAMEWORKS[name]
    with pytest.raises(
        AgentLoopError, match=r"the endpoint's last error: 400, .*raise rollout\.max_branches"
    ):
        await played(command_of(framework), framework.says[:1], max_context_tokens=40_000)
