import json

import pytest

from agent_loops.parsing import (
    PARSERS,
    MalformedCall,
    Parsed,
    ParsedStream,
    ToolCall,
    ToolParser,
    load_parser,
    recognise,
)
from async_rl.errors import ConfigError
from tests.support.tool_formats import RENDERERS


def parse(
    text: str, parser: str = "hermes", tools: list[dict] | None = None
) -> list[ToolCall | MalformedCall]:
    return load_parser(parser).parse(text, tools or []).calls


def tagged(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


ADD = tagged('{"name": "add", "arguments": {"a": 1}}')


@pytest.mark.parametrize("parser", PARSERS)
def test_all_is_content_when_the_text_has_no_calls(parser: str):
    text = "The answer is {4} <tool>"
    assert load_parser(parser).parse(text) == Parsed(content=text, calls=[])


@pytest.mark.parametrize("written", RENDERERS)
def test_call_is_malformed_when_it_is_cut_short(written: str):
    parser, render = RENDERERS[written]
    text = render([("search", {"query": "x" * 40})])
    (call,) = parse(text[: text.index("xx") + 10], parser)
    assert isinstance(call, MalformedCall)
    assert "cannot be read" in call.error


@pytest.mark.parametrize("written", [name for name in RENDERERS if not name.startswith("llama3")])
def test_later_call_is_kept_when_an_earlier_one_is_malformed(written: str):
    parser, render = RENDERERS[written]
    broken = render([("search", {"query": "?"})]).replace("?", '"</arg_value></parameter></parameter>')
    first, second = parse(broken + render([("add", {"a": 1})]), parser)
    assert isinstance(first, MalformedCall)
    assert second == ToolCall(name="add", arguments={"a": 1})


def test_arguments_are_empty_when_the_call_has_none():
    assert parse(tagged('{"name": "now"}')) == [ToolCall(name="now", arguments={})]


def test_arguments_are_decoded_when_they_are_a_string_of_json():
    body = json.dumps({"name": "add", "arguments": '{"a": 1}'})
    assert parse(tagged(body)) == [ToolCall(name="add", arguments={"a": 1})]


def test_call_is_whole_when_a_string_in_it_holds_the_closing_tag():
    call = {"name": "write", "arguments": {"text": "a </tool_call> b <tool_call>"}}
    assert parse(tagged(json.dumps(call)) + ADD) == [
        ToolCall(name="write", arguments={"text": "a </tool_call> b <tool_call>"}),
        ToolCall(name="add", arguments={"a": 1}),
    ]


def test_thought_is_ignored_when_it_mentions_a_call():
    assert parse(f"<think>I could {ADD}</think>\nNo.") == []
    assert parse(f"I could {ADD}</think>\n{ADD}") == [ToolCall(name="add", arguments={"a": 1})]


def test_call_is_kept_when_an_argument_ends_a_thought_once_more():
    body = json.dumps({"name": "write", "arguments": {"text": "a </think> b"}})
    assert parse("Hm.</think>" + tagged(body)) == [ToolCall(name="write", arguments={"text": "a </think> b"})]


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("{'name': 'add'}", "not valid JSON"),
        ('{"name": "add", "arguments": {"a": NaN}}', "NaN is not JSON"),
        ("[1]", "is an object with"),
        ('{"arguments": {}}', 'no "name"'),
        ('{"name": 3, "arguments": {}}', 'no "name"'),
        ('{"name": "add", "arguments": [1]}', "are not an object"),
        ('{"name": "add", "arguments": "nonsense"}', "arguments are not valid JSON"),
        ('{"name": "add"} and more', "not followed by </tool_call>"),
        ("[" * 200_000, "not valid JSON"),
        ('{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}", "not valid JSON"),
        ('{"name": "add", "arguments": {"a": "\\ud800"}}', "half of a surrogate pair"),
        ('{"name": "add", "parameters": {"a": 1}}', 'has "parameters", but'),
        ('{"name": "add", "args": {"a": 1}}', 'has "args", but'),
        ('{"name": "add", "arguments": {"a": 1e999}}', "1e999 is too large"),
        ('{"name": "add", "arguments": {"a": -Infinity}}', "-Infinity is not JSON"),
        ('{"name": "add", "arguments": "{\\"a\\": 1e999}"}', "1e999 is too large"),
        ('{"name": "add", "arguments": {"a": 1, "a": 2}}', "the key 'a' is there twice"),
        ('{"name": "add", "arguments": {}, "arguments": {"a": 1}}', "is there twice"),
    ],
)
def test_call_is_malformed_when_its_json_is_not_a_call(body: str, error: str):
    (call,) = parse(tagged(body))
    assert isinstance(call, MalformedCall)
    assert error in call.error


@pytest.mark.parametrize("broken", [tagged("nonsense"), "<tool_call>{never closed "])
def test_error_says_whether_the_call_was_closed_when_it_is_malformed(broken: str):
    first, second = parse(broken + ADD)
    assert isinstance(first, MalformedCall)
    assert ("not closed by </tool_call>" in first.error) == ("never" in broken)
    assert second == ToolCall(name="add", arguments={"a": 1})


SCHEMA = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "properties": {
                "text": {"type": "string"},
                "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "either": {"type": ["object", "string"]},
                "number": {"type": "integer"},
                "flag": {"type": "boolean"},
                "unit": {"enum": ["1", "2"]},
                "place": {"$ref": "#/$defs/Place"},
                "loop": {"$ref": "#/$defs/Loop"},
            },
            "$defs": {"Place": {"type": "object"}, "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}]}},
        },
    },
}


@pytest.mark.parametrize("parser", ["qwen3_coder", "glm45"])
@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("text", "3", "3"),
        ("text", '{"a": 1}', '{"a": 1}'),
        ("text", "null", "null"),
        ("text", "  if a < b:\n    c &lt; d", "  if a < b:\n    c &lt; d"),
        ("maybe", "null", None),
        ("maybe", "3", "3"),
        ("number", "3", 3),
        ("number", "three", "three"),
        ("flag", "true", True),
        ("flag", "True", True),
        ("unit", "1", "1"),
        ("place", '{"city": "Oslo"}', {"city": "Oslo"}),
        ("place", "{'city': 'Oslo'}", {"city": "Oslo"}),
        ("place", "{1, 2}", "{1, 2}"),
        ("maybe", "None", None),
        ("either", '{"a": 1, "a": 2}', '{"a": 1, "a": 2}'),
        ("unknown", "1,000", "1,000"),
        ("unknown", "[5] # not [6]", "[5] # not [6]"),
        ("unknown", "5 # six", "5 # six"),
        ("unknown", "1_000", "1_000"),
        ("unknown", "('a', [True])", ["a", [True]]),
        ("unknown", "{1: (2, 3)}", {"1": [2, 3]}),
        ("loop", "3", 3),
        ("unknown", "3", 3),
    ],
)
def test_value_has_the_type_of_the_schema_when_the_format_has_no_quotes(
    parser: str, key: str, written: str, value: object
):
    render = RENDERERS[parser][1]
    assert parse(render([("f", {key: written})]), parser, [SCHEMA]) == [
        ToolCall(name="f", arguments={key: value})
    ]


@pytest.mark.parametrize("parser", ["qwen3_coder", "glm45"])
@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"a": True}},
        {"properties": {"a": "string"}},
        {"properties": {"a": None}},
        {"properties": ["a"]},
        {"properties": {"a": {"type": ["integer", 3, None]}}},
        {"properties": {"a": {"type": 7}}},
        {"properties": {"a": {"enum": 5}}},
        {"properties": {"a": {"anyOf": [True, "x"], "oneOf": 3}}},
        {"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": [1]},
        "anything",
        True,
    ],
    ids=str,
)
def test_a_call_is_read_whatever_the_schema_of_its_tool_is(parser: str, parameters: object):
    """An agent sends it; booleans are schemas, and some generators write them."""
    schema = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    (call,) = parse(RENDERERS[parser][1]([("f", {"a": "3"})]), parser, [schema])
    assert (call.name, call.arguments) == ("f", {"a": 3})


def test_call_is_read_when_qwen3_coder_leaves_the_outer_tag_out():
    text = "Look:\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    parsed = load_parser("qwen3_coder").parse(text)
    assert parsed == Parsed(content="Look:\n", calls=[ToolCall(name="add", arguments={"a": 1})])


def test_json_is_an_answer_when_llama_3_names_no_parameters():
    for text in ('{"name": "Ann", "age": 3}', '{"a": 1}', '{"nam', "{"):
        assert load_parser("llama3").parse(text) == Parsed(content=text, calls=[])


def test_content_comes_at_once_when_nothing_can_be_a_call():
    stream = ParsedStream(load_parser("hermes"))
    assert [stream.feed(piece) for piece in ("Two < three <", "b> <tool", "_call>{")] == [
        "Two < three ",
        "<b> ",
        "",
    ]
    (call,) = stream.finish().calls
    assert isinstance(call, MalformedCall)


class ShoutParser(ToolParser):
    opening = ("!",)

    def read(self, text, tools):
        return [ToolCall(name=line[1:], arguments={}) for line in text.splitlines() if line.startswith("!")]


def test_parser_of_the_users_is_loaded_when_it_is_a_dotted_path():
    assert load_parser(f"{__name__}:ShoutParser").parse("Well\n!now") == Parsed(
        content="Well\n", calls=[ToolCall(name="now", arguments={})]
    )


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("hermess", "did you mean 'hermes'"),
        ("agent_loops.parsing:recognise", "not a subclass of agent_loops.parsing.ToolParser"),
        ("agent_loops.parsing:Nothing", "has no attribute 'Nothing'"),
    ],
)
def test_config_error_when_there_is_no_such_parser(name: str, error: str):
    with pytest.raises(ConfigError, match=error):
        load_parser(name)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ('<tools>{{ tool | tojson }}</tools> <tool_call>\\n{"name": <function-name>', "hermes"),
        ("<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>", "qwen3_coder"),
        ("<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>", "glm45"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "deepseekv3"),
        ("<|tool_calls_section_begin|> <|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>", "kimi_k2"),
        ("<|start_header_id|>system<|end_header_id|>\n\nEnvironment: ipython\n", "llama3"),
    ],
)
def test_format_is_recognised_when_a_chat_template_teaches_it(template: str, name: str):
    assert recognise(template) == name


@pytest.mark.parametrize(
    ("template", "error"),
    [
        ("{% for message in messages %}", "leaves tools out"),
        ("[AVAILABLE_TOOLS]{{ tools }}", "has an unknown format"),
    ],
)
def test_config_error_names_the_remedy_when_a_chat_template_teaches_none(template: str, error: str):
    with pytest.raises(ConfigError, match=f"{error}.*set rollout.agent_loop_args.parser"):
        recognise(template)


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("qwen3_coder", "<parameter=a>\n1\n<parameter=b>\n2\n</parameter>\n"),
        ("qwen3_coder", "<parameter=a\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n"),
        ("qwen3_coder", "<parameter=a>\n1\n</parameter>\n" * 2),
        ("glm45", "<arg_key>a</arg_key>\n<arg_value>1\n<arg_key>b</arg_key>\n<arg_value>2</arg_value>\n"),
        ("glm45", "<arg_key>a\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n<arg_value>2</arg_value>\n"),
        ("glm45", "<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n" * 2),
        ("qwen3_coder", '<parameter=a>\n{"b": 1, "b": 2}\n</parameter>\n'),
        ("glm45", "<arg_key>a</arg_key>\n<arg_value>{'b': 1, 'b': 2}</arg_value>\n"),
        ("glm45", "<arg_key>a</arg_key>\n<arg_value>{1: 1, '1': 2}</arg_value>\n"),
        ("glm45", "<arg_key>a</arg_key>\n<arg_value>{1: 1, True: 2}</arg_value>\n"),
    ],
)
def test_call_is_malformed_when_an_argument_is_not_closed_or_there_twice(parser: str, text: str):
    body = f"<function=add>\n{text}</function>" if parser == "qwen3_coder" else f"add\n{text}"
    (call,) = parse(tagged(body), parser)
    assert isinstance(call, MalformedCall)


def test_llama_calls_are_the_whole_answer():
    one, two = (json.dumps({"name": "f", "parameters": {"a": number}}) for number in (1, 2))
    both = [ToolCall(name="f", arguments={"a": number}) for number in (1, 2)]
    for between in ("; ", ", ", "\n", ""):
        assert parse(one + between + two, "llama3") == both
    for text, made in ((f"{one} and so on", []), (f"<|python_tag|>{one} and so on", both[:1])):
        *calls, rest = parse(text, "llama3")
        assert calls == made
        assert isinstance(rest, MalformedCall)


def test_no_call_is_made_in_a_thought_that_was_cut_off():
    call = tagged('{"name": "add", "arguments": {}}')
    assert parse(f"<think>I could write {call}") == []
    assert len(parse(f"<think>No.</think>{call}")) == 1
