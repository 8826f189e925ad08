import json

import pytest

from agent_loops.parsing import MalformedCall, ToolCall, parse_tool_calls


def tagged(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


ADD = tagged('{"name": "add", "arguments": {"a": 1}}')


def test_no_calls_are_found_when_the_text_has_none():
    assert parse_tool_calls("The answer is 4.") == []


def test_calls_come_in_order_when_there_are_several():
    text = f"Let me see.\n{ADD}\n" + tagged('{"name": "b", "arguments": {}}')
    assert parse_tool_calls(text) == [
        ToolCall(name="add", arguments={"a": 1}),
        ToolCall(name="b", arguments={}),
    ]


def test_arguments_are_empty_when_the_call_has_none():
    assert parse_tool_calls(tagged('{"name": "now"}')) == [ToolCall(name="now", arguments={})]


def test_arguments_are_decoded_when_they_are_a_string_of_json():
    body = json.dumps({"name": "add", "arguments": '{"a": 1}'})
    assert parse_tool_calls(tagged(body)) == [ToolCall(name="add", arguments={"a": 1})]


def test_call_is_whole_when_a_string_in_it_holds_the_closing_tag():
    call = {"name": "write", "arguments": {"text": "a </tool_call> b <tool_call>"}}
    assert parse_tool_calls(tagged(json.dumps(call)) + ADD) == [
        ToolCall(**call),
        ToolCall(name="add", arguments={"a": 1}),
    ]


def test_thought_is_ignored_when_it_mentions_a_call():
    assert parse_tool_calls(f"<think>I could {ADD}</think>\nNo.") == []


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("{'name': 'add'}", "not valid JSON"),
        ('{"name": "add", "arguments": {"a": NaN}}', "NaN is not JSON"),
        ("[1]", "is an object with"),
        ('{"arguments": {}}', 'no "name"'),
        ('{"name": 3, "arguments": {}}', 'no "name"'),
        ('{"name": "add", "arguments": [1]}', "are not an object"),
        ('{"name": "add", "arguments": "nonsense"}', "are not valid JSON"),
        ('{"name": "add"} and more', "not followed by </tool_call>"),
        ("[" * 200_000, "not valid JSON"),
        ('{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}", "not valid JSON"),
    ],
)
def test_call_is_malformed_when_it_cannot_be_read(body: str, error: str):
    (call,) = parse_tool_calls(tagged(body))
    assert isinstance(call, MalformedCall)
    assert error in call.error


def test_call_is_malformed_when_it_is_not_closed():
    (call,) = parse_tool_calls('<tool_call>\n{"name": "add", "argum')
    assert isinstance(call, MalformedCall)
    assert "not closed" in call.error


def test_later_call_is_kept_when_an_earlier_one_is_malformed():
    for broken in (tagged("nonsense"), "<tool_call>{never closed "):
        first, second = parse_tool_calls(broken + ADD)
        assert isinstance(first, MalformedCall)
        assert second == ToolCall(name="add", arguments={"a": 1})
