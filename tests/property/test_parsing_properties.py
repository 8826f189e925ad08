"""Parsers of tool calls: no text makes one raise, what is written is read, pieces add up to the whole."""

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from agent_loops.parsing import PARSERS, MalformedCall, ParsedStream, ToolCall, load_parser
from tests.support.tool_formats import RENDERERS, TAGS

NAMES = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_.-]{0,20}[a-z]", fullmatch=True)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
THRIFTY = settings(max_examples=30)
PIECES = st.lists(st.sampled_from(TAGS) | TEXTS, max_size=20)


def kind(value: Any) -> str:
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def schema(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    properties = {key: {"type": kind(value)} for key, value in arguments.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}


@pytest.mark.parametrize("name", PARSERS)
@THRIFTY
@given(text=PIECES.map("".join))
def test_no_text_makes_a_parser_raise(name: str, text: str) -> None:
    parsed = load_parser(name).parse(text)
    assert text.startswith(parsed.content)
    assert parsed.calls or parsed.content == text
    for call in parsed.calls:
        if isinstance(call, MalformedCall):
            assert call.error
        else:
            assert call.name.strip() == call.name != ""
            repr(call.arguments).encode()  # all values can be encoded


@pytest.mark.real
@pytest.mark.parametrize("written", RENDERERS)
@THRIFTY
@given(
    calls=st.dictionaries(NAMES, st.dictionaries(NAMES, VALUES, max_size=3), min_size=1, max_size=3),
    content=st.text("abc \nä{", max_size=10).filter(lambda text: not text.lstrip().startswith("{")),
    thought=st.sampled_from(["", "I could say <tool_call></think>"]),
)
def test_calls_are_read_back_when_they_are_written_in_a_format(
    written: str, calls: dict[str, dict[str, Any]], content: str, thought: str
) -> None:
    name, render = RENDERERS[written]
    if written == "llama3":
        content = ""  # without a tag, only a whole answer is a call
    tools = [schema(function, arguments) for function, arguments in calls.items()]
    rendered = render(list(calls.items()))
    assume(thought or "</think>" not in rendered)  # it is indistinguishable from the end of a thought
    parsed = load_parser(name).parse(thought + content + rendered, tools)
    assert parsed.calls == [ToolCall(name=f, arguments=arguments) for f, arguments in calls.items()]
    assert parsed.content == thought + content


@pytest.mark.parametrize("name", PARSERS)
@THRIFTY
@given(pieces=PIECES)
def test_pieces_add_up_to_the_whole_when_a_turn_is_streamed(name: str, pieces: list[str]) -> None:
    stream = ParsedStream(load_parser(name))
    content = "".join(stream.feed(piece) for piece in pieces)
    rest = stream.finish()
    whole = load_parser(name).parse("".join(pieces))
    assert content + rest.content == whole.content
    assert rest.calls == whole.calls
