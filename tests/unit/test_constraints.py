"""Requests that force what the policy writes: exact by a grammar and its masks, or refused, or counted."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import openai
import pytest
import xgrammar

from agent_loops.parsing import load_parser
from async_rl.errors import EngineError
from async_rl.openai_api.constraints import ANY_TOOL, Forced, forced_text
from async_rl.openai_api.endpoint import Endpoint
from tests.support.dialects import client_in
from tests.support.sessions import Bench
from tests.support.talk import lines, talking
from tests.unit.test_dialects import EACH, WEATHER, call

pytestmark = pytest.mark.real_time

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {**WEATHER, "name": name}} for name in ("weather", "time")]
THOUGHT = "<think>\nWhere?\n</think>\n\n"
JSON = '{"city": "Oslo"}'
CALL = call("Oslo")


def is_allowed(constraint: str, text: str) -> bool:
    """Whether a text is a whole turn by a grammar, as the engine's library reads it."""
    vocabulary = [bytes([number]) for number in range(256)] + [b"<end>"]
    info = xgrammar.TokenizerInfo(vocabulary, xgrammar.VocabType.RAW, stop_token_ids=[256])
    matcher = xgrammar.GrammarMatcher(xgrammar.GrammarCompiler(info).compile_structural_tag(constraint))
    return all(matcher.accept_token(token) for token in [*text.encode(), 256])


@pytest.mark.parametrize(
    ("forced", "allowed", "refused"),
    [
        (Forced(schema=SCHEMA), [JSON, THOUGHT + JSON, CALL], ["Oslo", "{}", "I say: " + JSON]),
        (Forced(tool=ANY_TOOL), [CALL, THOUGHT + CALL, f"{CALL}\n{CALL}"], [JSON, "I look.", THOUGHT]),
        (Forced(tool=ANY_TOOL, one_call=True), [CALL], [f"{CALL}\n{CALL}"]),
        (Forced(tool="time"), [CALL.replace("weather", "time")], [CALL]),
    ],
)
def test_a_grammar_allows_what_was_forced_alone_or_after_a_thought(
    forced: Forced, allowed: list[str], refused: list[str]
):
    constraint = forced_text(forced, TOOLS, load_parser("hermes"), opens_thought=False)
    assert [is_allowed(constraint, text) for text in allowed] == [True] * len(allowed)
    assert [is_allowed(constraint, text) for text in refused] == [False] * len(refused)


def test_a_thought_that_the_prompt_has_opened_is_closed_first():
    constraint = forced_text(Forced(schema=SCHEMA), [], None, opens_thought=True)
    assert is_allowed(constraint, "Where?\n</think>\n\n" + JSON)
    assert not is_allowed(constraint, JSON)


@pytest.mark.parametrize("name", ["hermes", "llama3"])
def test_calls_that_are_forced_are_calls_that_are_read(name: str):
    parser = load_parser(name)
    begin, end = parser.around_arguments('a"b')
    ((called, arguments),) = parser.split(f"{begin}{JSON}{end}", TOOLS)[1]
    assert (called, arguments) == ('a"b', {"city": "Oslo"})


def forcing(dialect: str) -> dict[str, Any]:
    """A request for text of a schema."""
    wanted = {"type": "json_schema", "name": "place", "schema": SCHEMA}
    if dialect == "messages":
        return {"extra_body": {"output_config": {"format": wanted}}}
    if dialect == "chat":
        return {"response_format": {"type": "json_schema", "json_schema": wanted}}
    return {"text": {"format": wanted}}


def choosing(dialect: str) -> dict[str, Any]:
    """A request that a tool is called."""
    return {"tool_choice": {"type": "any"} if dialect == "messages" else "required"}


def constraints_of(bench: Bench) -> list[str | None]:
    """The constraints of the turns that are sampled from now on."""
    seen: list[str | None] = []
    generate = bench.session.generate

    async def watched(**options: Any) -> Any:
        seen.append(options["constraint"])
        return await generate(**options)

    bench.session.generate = watched  # type: ignore[method-assign]
    return seen


@EACH
async def test_what_a_request_forces_reaches_the_engine_where_it_is_exact(dialect: str):
    bench, _ = talking(lines(JSON, CALL), interrupt="retract", top_k=50)
    seen = constraints_of(bench)
    opened = Endpoint().open_trajectory(bench.session, reader=load_parser("hermes"))
    async with opened as access, client_in(dialect, access) as client:
        assert json.loads((await client.ask("Where?", **forcing(dialect))).text) == {"city": "Oslo"}
        client.history.clear()
        client.last = None
    assert seen[0] is not None
    assert is_allowed(seen[0], JSON)
    assert not is_allowed(seen[0], "Oslo")


@EACH
@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"top_k": 50}, "weights.interrupt: abort"),
        ({"interrupt": "retract"}, "set rollout.top_k"),
    ],
)
@pytest.mark.parametrize("force", [forcing, choosing])
async def test_what_cannot_be_exact_is_refused_with_the_remedy_or_counted(
    dialect: str, options: dict[str, Any], why: str, force: Any
):
    refusals = (openai.BadRequestError, anthropic.BadRequestError)
    for ignores in (False, True):
        bench, _ = talking(lines("Oslo"), **options)
        opened = Endpoint().open_trajectory(
            bench.session, reader=load_parser("hermes"), ignores_constraints=ignores
        )
        async with opened as access, client_in(dialect, access) as client:
            if ignores:
                assert (await client.ask("Where?", tools=[WEATHER], **force(dialect))).text == "Oslo"
            else:
                with pytest.raises(refusals, match=why) as caught:
                    await client.ask("Where?", tools=[WEATHER], **force(dialect))
                assert "constraints: ignore" in str(caught.value)
        name = "tool_choice" if force is choosing else "response_format"
        assert bench.counted("openai_ignored_total", parameter=name) == ignores


async def test_an_interrupted_turn_fails_instead_of_going_on_without_its_grammar():
    bench, talker = talking(lines("A long answer."), interrupt="retract", top_k=50, decode_step_s=0.01)
    bench.session.start([{"role": "user", "content": "Where?"}])

    async def interrupt() -> None:
        await talker.has_said(3)
        await bench.abort()

    turn = bench.session.generate(constraint="{}")
    answered, _ = await asyncio.gather(turn, interrupt(), return_exceptions=True)
    assert isinstance(answered, EngineError)
    assert "was interrupted after" in str(answered)
