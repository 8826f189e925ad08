"""One agent in three dialects, by the official clients: the same tokens become the same trajectory."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx
import openai
import pytest

from agent_loops.parsing import load_parser
from async_rl.openai_api.endpoint import Endpoint
from tests.support.dialects import client_in
from tests.support.talk import lines, talking

pytestmark = pytest.mark.real_time

WEATHER = {
    "name": "weather",
    "description": "Tell the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
THOUGHT = "<think>\nWhere?\n</think>\n\n"
EACH = pytest.mark.parametrize("dialect", ["chat", "responses", "chained", "messages"])
BY_ID = pytest.mark.parametrize("dialect", ["chained", "threaded"])
STREAMED = pytest.mark.parametrize("stream", [False, True])


def call(city: str) -> str:
    return f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'


def opened(script: Any, **options: Any) -> tuple[Any, Any]:
    bench, _ = talking(script, **options)
    return bench, Endpoint().open_trajectory(bench.session, reader=load_parser("hermes"))


async def trajectory_text(bench: Any) -> str:
    trajectory = await bench.session.finish_trajectory("completed", {"reward": 1.0})
    return str(bench.chat.tokenizer.decode(trajectory.token_ids, skip_special_tokens=False))


TRAJECTORY = (
    "<|im_start|>user\nWeather?<|im_end|>\n"
    f"<|im_start|>assistant\n{THOUGHT}I look für dich.\n{call('Oslo')}\n{call('Rome')}<|im_end|>\n"
    "<|im_start|>user\n<tool_response>\nrain\n</tool_response>\n<tool_response>\nsun\n</tool_response>"
    "<|im_end|>\n<|im_start|>assistant\nRain and sun.<|im_end|>\n<|im_start|>user\nThanks.<|im_end|>\n"
    "<|im_start|>assistant\nBye.<|im_end|>"
)


@pytest.mark.parametrize("dialect", ["chat", "responses", "chained", "messages", "threaded"])
@STREAMED
async def test_a_conversation_with_parallel_calls_is_the_same_trajectory_in_each_dialect(
    dialect: str, stream: bool
):
    said = f"{THOUGHT}I look für dich.\n{call('Oslo')}\n{call('Rome')}"
    bench, serving = opened(lines(said, "Rain and sun.", "Bye."))
    async with serving as access, client_in(dialect, access) as client:
        say = client.hear if stream and dialect != "chat" else client.ask
        first = await say("Weather?", tools=[WEATHER])
        assert (first.text, first.thought) == ("I look für dich.", "Where?")
        assert [each[1:] for each in first.calls] == [("weather", {"city": c}) for c in ("Oslo", "Rome")]
        ids = [each[0] for each in first.calls]
        second = await say((ids[0], "rain"), (ids[1], "sun"), tools=[WEATHER])
        third = await say("Thanks.", tools=[WEATHER])
        assert (second.text, third.text) == ("Rain and sun.", "Bye.")
        num_tokens = bench.session.num_tokens
        assert sum(third.tokens) == num_tokens
    text = await trajectory_text(bench)
    assert text.endswith(TRAJECTORY)
    assert bench.counted("tool_calls_total", tool="weather", status="ok") == 2
    assert text.count("<|im_start|>system") == 1  # the tools


@EACH
async def test_ends_are_told_as_each_dialect_tells_them(dialect: str):
    bench, serving = opened(lines("A long answer.", call("Oslo"), "Short."))
    async with serving as access, client_in(dialect, access) as client:
        cut = await client.ask("Weather?", tools=[WEATHER], max_tokens=3)
        called = await client.ask("Again.", tools=[WEATHER])
        whole = await client.ask((called.calls[0][0], "rain"), tools=[WEATHER])
    assert cut.text == "A l"
    assert (cut.reason, called.reason, whole.reason) == {
        "chat": ("length", "tool_calls", "stop"),
        "messages": ("max_tokens", "tool_use", "end_turn"),
    }.get(dialect, ("incomplete", "completed", "completed"))
    await bench.session.finish_trajectory("completed", {"reward": 1.0})


@EACH
async def test_instructions_are_the_system_message_and_others_begin_another_conversation(dialect: str):
    bench, serving = opened(lines("One.", "Two.", "Three."), max_branches=1)
    async with serving as access, client_in(dialect, access) as client:
        await client.ask("Count.", system="Be brief.")
        await client.ask("On.", system="Be brief.")
        assert bench.session.num_turns == 2
        if dialect == "chat":
            client.history[0] = {"role": "system", "content": "Be long."}
        assert (await client.ask("On.", system="Be long.")).text == "Three."
        assert bench.session.num_turns == 2
    _, other = bench.session.tree
    text = bench.chat.tokenizer.decode(other.transcript.tokens.token_ids, skip_special_tokens=False)
    assert text == (
        "<|im_start|>system\nBe long.<|im_end|>\n<|im_start|>user\nCount.<|im_end|>\n"
        "<|im_start|>assistant\nOne.<|im_end|>\n<|im_start|>user\nOn.<|im_end|>\n"
        "<|im_start|>assistant\nTwo.<|im_end|>\n<|im_start|>user\nOn.<|im_end|>\n"
        "<|im_start|>assistant\nThree.<|im_end|>"
    )


@BY_ID
async def test_an_earlier_answer_can_be_continued_a_second_time(dialect: str):
    bench, serving = opened(lines("One.", "Two.", "Other two."), max_branches=1)
    async with serving as access, client_in(dialect, access) as client:
        first = await client.ask("Count.")
        await client.ask("On.")
        client.last = first.id
        assert (await client.ask("Differently.")).text == "Other two."
    _, other = bench.session.tree
    assert [m["content"] for m in other.messages] == ["Count.", "One.", "Differently.", "Other two."]


async def test_a_response_of_a_lost_attempt_is_not_found_and_the_whole_history_is_accepted():
    _bench, serving = opened(lines("One."))
    async with serving as access, client_in("chained", access) as client:
        client.last = "resp_of_another_worker"
        with pytest.raises(openai.BadRequestError, match=r"Previous response .* not found") as caught:
            await client.ask("Count.")
        assert caught.value.code == "previous_response_not_found"
        client.last = None
        assert (await client.ask()).text == "One."


async def test_a_thread_keeps_its_instructions_and_tools():
    bench, serving = opened(lines("One.", "Two.", call("Oslo")))
    async with serving as access, client_in("threaded", access) as client:
        await client.ask("Count.", system="Be brief.", tools=[WEATHER])
        await client.ask("On.")
        assert (await client.ask("Weather?")).calls[0][1:] == ("weather", {"city": "Oslo"})
    assert bench.session.num_turns == 3
    assert bench.session.messages[0] == {"role": "system", "content": "Be brief."}


async def test_a_thread_of_a_lost_attempt_is_not_found_and_the_whole_history_is_accepted():
    _bench, serving = opened(lines("One."))
    async with serving as access, client_in("threaded", access) as client:
        client.last = "msg_of_another_worker"
        with pytest.raises(anthropic.NotFoundError, match=r"Previous message .* not found") as caught:
            await client.ask("Count.")
        assert caught.value.body["error"]["details"] == {"error_code": "thread_not_found"}
        client.last, client.history = None, []
        assert (await client.ask("Count.")).text == "One."


async def test_a_repeated_request_gets_the_same_response_which_can_be_continued():
    bench, serving = opened(lines("One.", "Two."))
    async with serving as access, client_in("chained", access) as client:
        again = {"extra_headers": {"x-stainless-retry-count": "1"}}
        first = await client.ask("Count.")
        client.last, client.history = None, []
        second = await client.ask("Count.", **again)
        assert second.id == first.id
        assert (await client.ask("On.")).text == "Two."
    assert bench.session.num_turns == 2


async def test_reasoning_items_may_be_sent_back_whole_or_left_out():
    bench, serving = opened(lines(f"{THOUGHT}One.", f"{THOUGHT}Two.", "Three."))
    async with serving as access, client_in("responses", access) as client:
        await client.ask("Count.", include=["reasoning.encrypted_content"], store=False)
        assert client.history[1]["type"] == "reasoning"
        await client.ask("On.")
        client.history = [item for item in client.history if item.get("type") != "reasoning"]
        await client.ask("On.")
    assert bench.session.num_turns == 3


async def test_references_name_the_items_of_earlier_answers():
    said = f"{THOUGHT}I look.\n{call('Oslo')}\n{call('Rome')}"
    bench, serving = opened(lines(said, "Rain and sun.", "Bye."))
    async with serving as access, client_in("responses", access) as client:
        first = await client.ask("Weather?", tools=[WEATHER])
        named = [{"type": "item_reference", "id": item["id"]} for item in first.items]
        client.history[1:] = named
        await client.ask((first.calls[0][0], "rain"), (first.calls[1][0], "sun"), tools=[WEATHER])
        del client.history[1]  # the thought
        await client.ask("Thanks.", tools=[WEATHER])
    assert bench.session.num_turns == 3
    assert [m.get("name") for m in bench.session.messages if m["role"] == "tool"] == ["weather"] * 2


@pytest.mark.parametrize("unknown", ["msg_of_another_worker", "nonsense", "fc_{}_7", "fc_{}"])
async def test_a_reference_to_an_item_of_a_lost_attempt_is_refused(unknown: str):
    _bench, serving = opened(lines("One."))
    async with serving as access, client_in("responses", access) as client:
        answer_id = (await client.ask("Count.")).id.removeprefix("resp_")
        client.history[1] = {"type": "item_reference", "id": unknown.format(answer_id)}
        with pytest.raises(openai.NotFoundError, match="send the item itself"):
            await client.ask("On.")


async def test_each_streamed_call_has_a_chunk_of_its_own():
    _bench, serving = opened(lines(f"{call('Oslo')}\n{call('Rome')}"))
    async with serving as access, client_in("chat", access) as client:
        chunks = await client.client.chat.completions.create(
            model="policy",
            messages=[{"role": "user", "content": "Weather?"}],
            tools=[{"type": "function", "function": WEATHER}],
            stream=True,
        )
        deltas = [chunk.choices[0].delta.tool_calls async for chunk in chunks]
    assert [[each.index for each in delta] for delta in deltas if delta] == [[0], [1]]


async def test_stop_sequences_end_a_message():
    _bench, serving = opened(lines("Thought: I look. STOP and more", "never said"))
    async with serving as access, client_in("messages", access) as client:
        heard = await client.ask("Go.", stop_sequences=["STOP"])
        assert (heard.text, heard.reason) == ("Thought: I look. ", "stop_sequence")


async def test_tokens_are_counted_as_they_are_then_read():
    bench, serving = opened(lines("One.", "Two."))
    async with serving as access, client_in("messages", access) as client:
        for new in ("Count.", "On."):
            messages = [*client.history, {"role": "user", "content": [{"type": "text", "text": new}]}]
            counted = await client.client.messages.count_tokens(
                model="policy", messages=messages, system="Be brief."
            )
            assert (await client.ask(new, system="Be brief.")).tokens[0] == counted.input_tokens
    assert bench.session.num_turns == 2


async def test_claude_codes_billing_block_does_not_change_the_conversation():
    bench, serving = opened(lines("One.", "Two."))
    async with serving as access, client_in("messages", access) as client:
        for number, new in enumerate(("Count.", "On.")):
            billing = f"x-anthropic-billing-header: cc_version=2.1; cch={number};"
            system = [{"type": "text", "text": text} for text in (billing, "Be brief.")]
            await client.ask(new, system=system)
    assert bench.session.num_turns == 2
    assert bench.session.messages[0] == {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role is 'robot'"),
        ({"messages": [{"role": "assistant", "content": "I"}]}, "the last message is the assistant's"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'image'"),
        ({"mcp_servers": [{"url": "http://x"}]}, "mcp_servers is not supported"),
        ({"tools": [{"name": "x"}]}, "expected a tool with an input_schema"),
        ({"max_tokens": 0}, "at least 1"),
    ],
)
async def test_what_messages_cannot_have_is_refused_in_anthropics_format(
    request_: dict[str, Any], message: str
):
    _bench, serving = opened(lines("Still here."))
    async with serving as access, client_in("messages", access) as client:
        valid = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
        with pytest.raises(anthropic.BadRequestError, match=message) as caught:
            await client.client.messages.create(**valid, extra_body=request_)
        assert caught.value.body["type"] == "error"
        assert caught.value.body["error"]["type"] == "invalid_request_error"
        assert (await client.ask("Hi")).text == "Still here."


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"input": []}, "at least one item"),
        ({"input": [{"type": "item_reference"}]}, "'item_reference' are not supported"),
        ({"input": [{"role": "robot", "content": "x"}]}, "role is 'robot'"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "needs its call_id"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "only text"),
        ({"background": True}, "background is not supported"),
        ({"conversation": "c"}, "conversation is not supported"),
        ({"top_logprobs": 3}, "top_logprobs is not supported"),
        ({"tools": [{"type": "custom", "name": "x"}]}, "custom tools are not supported"),
        ({"tools": [{"type": "function"}]}, "expected a function with a name"),
    ],
)
async def test_what_responses_cannot_have_is_refused(request_: dict[str, Any], message: str):
    _bench, serving = opened(lines("Still here."))
    async with serving as access, client_in("responses", access) as client:
        with pytest.raises(openai.BadRequestError, match=message):
            await client.client.responses.create(
                model="m", input=request_.pop("input", "Hi"), extra_body=request_
            )
        assert (await client.ask("Hi")).text == "Still here."


@EACH
async def test_parameters_of_sampling_and_hosted_tools_are_counted_and_ignored(dialect: str):
    bench, serving = opened(lines("One."))
    async with serving as access, client_in(dialect, access) as client:
        sampling = {"temperature": 0.3, "top_p": 0.5}
        more: dict[str, Any] = {"extra_body": sampling}
        if dialect == "messages":
            tools = [{"type": "web_search_20250305", "name": "web_search"}]
            more["extra_body"] = {**sampling, "tools": tools}
            more["thinking"] = {"type": "enabled", "budget_tokens": 1024}
            more["max_tokens"] = 2048
        elif dialect != "chat":
            more["extra_body"] = {
                **sampling,
                "tools": [{"type": "web_search"}],
                "reasoning": {"effort": "high"},
            }
        assert (await client.ask("Count.", **more)).text == "One."
    counted = bench.metrics.registry.get_sample_value
    name = "async_rl_openai_ignored_total"
    assert counted(name, {"parameter": "temperature"}) == 1
    if dialect != "chat":
        assert counted(name, {"parameter": "hosted_tools"}) == 1


@EACH
async def test_a_full_context_is_told_as_clients_recognise_it(dialect: str):
    _bench, serving = opened(lines("One."))
    async with serving as access, client_in(dialect, access) as client:
        with pytest.raises((openai.BadRequestError, anthropic.BadRequestError)) as caught:
            await client.ask("word " * 4000)
    if dialect == "messages":
        assert caught.value.body["error"]["message"].startswith("prompt is too long")
    else:
        assert caught.value.code == "context_length_exceeded"


@EACH
async def test_the_key_may_be_in_the_path_which_may_lack_the_version(dialect: str):
    path = {"chat": "chat/completions", "messages": "messages"}.get(dialect, "responses")
    asked = {"messages": [{"role": "user", "content": "Hi"}]} if path != "responses" else {"input": "Hi"}
    _, serving = opened(lines("Hello."))
    async with serving as access, httpx.AsyncClient(trust_env=False) as client:
        for url in (access.session_url, access.session_url.removesuffix("/v1")):
            answer = await client.post(f"{url}/{path}", json=asked)
            assert answer.status_code == 200
            assert "Hello." in answer.text
        refused = await client.post(f"{access.base_url}/{path}", json=asked, headers={"x-api-key": "sk-1-x"})
        assert refused.status_code == 401
        assert ("type" in refused.json()) == (dialect == "messages")
