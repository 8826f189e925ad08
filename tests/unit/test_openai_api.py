"""The OpenAI endpoint, asked by OpenAI's own client."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import httpx
import openai
import pytest

from agent_loops.openai_agent import AgentAPI
from agent_loops.testing import ScriptedSession
from async_rl.errors import PromptTooLong
from async_rl.openai_api.chat_completions import ChatCompletions
from async_rl.openai_api.endpoint import Endpoint
from async_rl.openai_api.history import Exchange, message_digests
from async_rl.openai_api.request_handler import RequestHandler
from async_rl.runtime.supervision import Nursery
from tests.support.api import asked, client_of, reply
from tests.support.talk import Talker, lines

pytestmark = pytest.mark.real_time

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tell the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def call(city: str) -> str:
    return f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'


def result(call_id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


async def test_a_conversation_becomes_one_trajectory_when_each_request_appends():
    async with asked(lines("Hello.", "Fine, thanks.")) as a:
        first = await a.say({"role": "developer", "content": "Be kind."}, "Hi")
        second = await a.say({"role": "system", "content": "Be kind."}, "Hi", reply(first), "How are you?")
        trajectory = await a.trajectory()
    assert first.choices[0].message.content == "Hello."
    assert first.choices[0].finish_reason == "stop"
    assert second.choices[0].message.content == "Fine, thanks."
    assert a.text(trajectory) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\nHow are you?<|im_end|>\n"
        "<|im_start|>assistant\nFine, thanks.<|im_end|>"
    )
    written = trajectory.token_ids[trajectory.response_mask]
    assert a.bench.chat.decode(written) == "Hello.Fine, thanks."
    assert (trajectory.rollout_log_probs[trajectory.response_mask] < 0).all()
    assert trajectory.trace is not None
    assert trajectory.trace.valid.all()
    assert second.usage.prompt_tokens + second.usage.completion_tokens == trajectory.num_tokens


async def test_tool_calls_go_out_with_ids_and_results_come_back_in_one_block_when_they_are_parallel():
    async with asked(lines("I look.\n" + call("Oslo") + "\n" + call("Rome"), "Rain and sun.")) as a:
        first = await a.say("Weather?", tools=[WEATHER])
        said = first.choices[0].message
        assert said.content == "I look."
        assert [(c.type, c.function.name) for c in said.tool_calls] == [("function", "weather")] * 2
        assert [json.loads(c.function.arguments) for c in said.tool_calls] == [
            {"city": "Oslo"},
            {"city": "Rome"},
        ]
        ids = [c.id for c in said.tool_calls]
        assert len(set(ids)) == 2
        assert first.choices[0].finish_reason == "tool_calls"
        results = [result(ids[0], "rain"), result(ids[1], "sun")]
        second = await a.say("Weather?", reply(first), *results, tools=[WEATHER])
        trajectory = await a.trajectory()
    assert second.choices[0].message.content == "Rain and sun."
    text = a.text(trajectory)
    assert '"name": "weather", "description": "Tell the weather."' in text
    assert "<tool_response>\nrain\n</tool_response>\n<tool_response>\nsun\n</tool_response><|im_end|>" in text
    assert [type(segment).__name__ for segment in trajectory.segments] == ["Context", "Sampled"] * 2


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_stay_text_when_tools_may_not_be_called_or_cannot_be_read(stream: bool):
    broken = "<tool_call>\nnonsense\n</tool_call>"
    async with asked(lines(call("Oslo"), broken)) as a:
        answers = []
        for choice in ("none", "auto"):
            request = {"tools": [WEATHER], "tool_choice": choice}
            if stream:
                chunks = await a.stream("Weather?", *answers, **request)
                said = "".join(c.choices[0].delta.content or "" for c in chunks)
                assert not any(c.choices[0].delta.tool_calls for c in chunks)
            else:
                message = (await a.say("Weather?", *answers, **request)).choices[0].message
                said = message.content
                assert message.tool_calls is None
            answers += [{"role": "assistant", "content": said}, {"role": "user", "content": "Again."}]
    assert [m["content"] for m in answers[::2]] == [call("Oslo"), broken]


async def test_thoughts_are_reasoning_and_may_be_left_out_of_the_history():
    async with asked(lines("<think>\nHm.\n</think>\n\nYes.", "Sure.")) as a:
        first = await a.say("Really?")
        assert first.choices[0].message.content == "Yes."
        assert first.choices[0].message.reasoning_content == "Hm."
        plain = {"role": "assistant", "content": [{"type": "text", "text": "Yes."}]}
        await a.say("Really?", plain, "Sure?")
        assert "<think>\nHm.\n</think>\n\nYes.<|im_end|>" in a.text(await a.trajectory())


@pytest.mark.parametrize("content", ["", None])
async def test_the_text_beside_calls_may_be_left_out_of_the_history_but_not_changed(content: str | None):
    said = ["I look.\n" + call("Oslo"), "Rain.", "Other rain."]
    async with asked(lines(*said), max_branches=1) as a:
        first = await a.say("Weather?", tools=[WEATHER])
        told = result(first.choices[0].message.tool_calls[0].id, "rain")
        without = reply(first) | {"content": content}
        await a.say("Weather?", without, told, tools=[WEATHER])
        changed = reply(first) | {"content": "I guess."}
        await a.say("Weather?", changed, told, tools=[WEATHER])
    whole, other = await a.trajectories()
    assert f"{said[0]}<|im_end|>" in a.text(whole)
    assert "Rain.<|im_end|>" in a.text(whole)
    assert f"I guess.\n{call('Oslo')}" in a.text(other)


async def test_a_stream_adds_up_to_the_answer():
    text = "<think>\nWhere?\n</think>\n\nI look für dich.\n" + call("Oslo")
    async with asked(lines(text)) as a:
        chunks = await a.stream("Weather?", tools=[WEATHER], stream_options={"include_usage": True})
    *parts, usage = chunks
    deltas = [chunk.choices[0].delta for chunk in parts]
    assert deltas[0].role == "assistant"
    assert "".join(d.content or "" for d in deltas) == "I look für dich."
    assert "".join(getattr(d, "reasoning_content", None) or "" for d in deltas) == "Where?"
    (called,) = [d.tool_calls for d in deltas if d.tool_calls]
    assert called[0].index == 0
    assert json.loads(called[0].function.arguments) == {"city": "Oslo"}
    assert [c.choices[0].finish_reason for c in parts if c.choices[0].finish_reason] == ["tool_calls"]
    assert usage.usage.completion_tokens == len(text.encode()) + 1


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probs_are_those_of_the_trajectory(stream: bool):
    async with asked(lines("Hello.")) as a:
        if stream:
            choices = [chunk.choices[0] for chunk in await a.stream("Hi", logprobs=True)]
            told = [token for choice in choices if choice.logprobs for token in choice.logprobs.content]
        else:
            told = (await a.say("Hi", logprobs=True)).choices[0].logprobs.content
        trajectory = await a.trajectory()
    assert [token.token for token in told] == [*"Hello.", "<|im_end|>"]
    recorded = trajectory.rollout_log_probs[trajectory.response_mask].tolist()
    assert [token.logprob for token in told] == pytest.approx(recorded)


async def test_limits_and_stops_of_a_request_are_kept():
    async with asked(lines("one two three", "four END five")) as a:
        short = await a.say("Count.", max_completion_tokens=3, max_tokens=5)
        assert short.choices[0].message.content == "one"
        assert short.choices[0].finish_reason == "length"
        assert short.usage.completion_tokens == 3
        stopped = await a.say("Count.", reply(short), "Go on.", stop=["END"])
        assert stopped.choices[0].message.content == "four "
        assert stopped.choices[0].finish_reason == "stop"


async def test_the_policy_answers_under_any_models_name():
    async with asked(lines("Hello.", "Hello.")) as a:
        answer = await a.client.chat.completions.create(
            model="openai/gpt-4o", messages=[{"role": "user", "content": "x"}]
        )
        assert (answer.model, answer.choices[0].message.content) == ("openai/gpt-4o", "Hello.")
        assert (await a.client.models.retrieve("gpt-4o")).id == "gpt-4o"


async def test_an_unknown_path_is_not_found():
    async with asked(lines("never said")) as a:
        with pytest.raises(
            openai.NotFoundError, match="/embeddings is not supported; there are GET /v1/models"
        ):
            await a.client.embeddings.create(model="policy", input="x")


async def test_models_are_listed_and_a_key_in_the_path_is_enough():
    async with asked(lines("Hello.")) as a:
        assert [model.id async for model in a.client.models.list()] == ["policy"]
        assert (await a.client.models.retrieve("policy")).id == "policy"
        other = a.client.with_options(base_url=a.access.session_url, api_key="anything")
        answer = await other.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "Hi"}]
        )
        assert answer.choices[0].message.content == "Hello."


async def test_a_key_opens_only_its_own_trajectory_and_only_while_it_is_open():
    endpoint = Endpoint()
    async with asked(lines("of the first"), endpoint=endpoint) as first:
        async with asked(lines("of the second"), endpoint=endpoint) as second:
            assert second.access.base_url == first.access.base_url
            assert (await second.say("Hi")).choices[0].message.content == "of the second"
            assert (await first.say("Hi")).choices[0].message.content == "of the first"
        async with client_of(second.access, max_retries=2) as late:
            with pytest.raises(openai.APIStatusError) as over:
                await late.models.list()
        assert over.value.status_code == 410
        forged = first.access.api_key[:-1] + ("0" if first.access.api_key[-1] != "0" else "1")
        for key in (b"nothing", b"sk-1-", forged.encode(), "sk-9-ü".encode(), b"sk-\xff\xfe-0", b"9" * 5000):
            async with httpx.AsyncClient(trust_env=False) as client:
                answer = await client.get(
                    f"{first.access.base_url}/models", headers={"Authorization": b"Bearer " + key}
                )
            assert answer.status_code == 401, key


async def test_a_body_is_refused_when_it_is_too_large():
    async with asked(lines("never said"), endpoint=Endpoint(max_body_bytes=1000)) as a:
        with pytest.raises(openai.APIStatusError) as refused:
            await a.say("x" * 2000)
        assert refused.value.status_code == 413
        assert "raise agent_loop_args.max_body_bytes" in str(refused.value)


async def test_a_body_that_could_not_fit_is_too_long_however_large_it_is():
    """Else the size would decide whether the attempt counts."""
    async with asked(lines("Hello.", "Short."), endpoint=Endpoint(max_body_bytes=1_000_000)) as a:
        first = await a.say("Hi")
        for size, chunked in ((500_000, False), (2_000_000, False), (2_000_000, True)):
            hi, more = ({"role": "user", "content": text} for text in ("Hi", "x" * size))
            body = json.dumps({"messages": [hi, reply(first), more]}).encode()

            async def pieces(body: bytes = body) -> AsyncIterator[bytes]:
                yield body

            async with httpx.AsyncClient(trust_env=False) as client:
                url = f"{a.access.session_url}/chat/completions"
                answer = await client.post(url, content=pieces() if chunked else body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
            assert isinstance(a.access.handler.exceeded, PromptTooLong)
        await a.say("Hi", reply(first), "In short?")
        assert a.access.handler.exceeded is None
        assert a.bench.counted("openai_requests_total", result="refused") == 2


@pytest.mark.parametrize("arguments", ["", " ", "null", None, "{}", "{ }", "absent"])
async def test_a_call_without_arguments_is_known_however_a_client_writes_it(arguments: str | None):
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    async with asked(lines(call, "Noon.")) as a:
        tools = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]
        message = reply(await a.say("Time?", tools=tools))
        function = message["tool_calls"][0]["function"]
        function["arguments"] = arguments
        if arguments == "absent":
            del function["arguments"]
        message["content"] = [{"type": "reasoning", "text": "I call it."}, {"type": "refusal", "refusal": ""}]
        call_id = message["tool_calls"][0].pop("id")
        if not arguments:
            message["tool_calls"][0]["id"] = call_id = None
        result = {"role": "tool", "tool_call_id": call_id, "content": "12"}
        assert (await a.say("Time?", message, result, tools=tools)).choices[0].message.content == "Noon."


@pytest.mark.parametrize(
    ("sent", "written"), [("-0.0", "0"), ("1.0", "1"), *((f"{'[' * n}{']' * n}",) * 2 for n in (70, 480))]
)
async def test_arguments_are_known_as_javascript_writes_them(sent: str, written: str):
    call = f'<tool_call>\n{{"name": "f", "arguments": {{"a": {sent}}}}}\n</tool_call>'
    async with asked(lines(call, "Done.")) as a:
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
        message = reply(await a.say("Go", tools=tools))
        message["tool_calls"][0]["function"]["arguments"] = f'{{"a":{written}}}'
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "1"}
        assert (await a.say("Go", message, result, tools=tools)).choices[0].message.content == "Done."


async def test_the_scheme_of_a_key_may_have_any_case():
    async with asked(lines("Hello.")) as a, httpx.AsyncClient(trust_env=False) as client:
        for scheme in ("bearer ", "BEARER  ", ""):
            headers = {"Authorization": f"{scheme}{a.access.api_key}"}
            assert (await client.get(f"{a.access.base_url}/models", headers=headers)).status_code == 200


async def test_an_agent_is_told_when_its_context_is_full():
    async with asked(lines("Hello.")) as a:
        with pytest.raises(openai.BadRequestError) as refused:
            await a.say("x" * 9000)
        assert refused.value.code == "context_length_exceeded"
        # A shorter one is answered.
        assert (await a.say("Hi")).choices[0].message.content == "Hello."


async def test_sampling_parameters_are_ignored_and_that_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    # A package that configures logging while it is imported by an earlier test may disable our loggers.
    for name in ("async_rl", "async_rl.openai_api", "async_rl.openai_api.endpoint"):
        monkeypatch.setattr(logging.getLogger(name), "disabled", False)
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
        caplog.set_level(logging.WARNING, logger=name)
    async with asked(lines("Hello.", "Again.")) as a:
        first = await a.say("Hi", temperature=0.1, seed=4, presence_penalty=0, top_p=1)
        await a.say("Hi", reply(first), "More", temperature=0.1)
    ignored = {
        name: a.bench.counted("openai_ignored_total", parameter=name)
        for name in ("temperature", "seed", "top_p")
    }
    assert ignored == {"temperature": 2, "seed": 1, "top_p": 0}
    said = [r.getMessage() for r in caplog.records if "is ignored" in r.getMessage()]
    assert len(said) == 2
    assert any("temperature = 0.1" in line for line in said)
    assert a.access.api_key not in caplog.text


class Dropping(httpx.AsyncHTTPTransport):
    """Loses its first connection: before the answer came, or after."""

    def __init__(self, talker: Talker, *, early: bool) -> None:
        super().__init__(trust_env=False)
        self.lost = 0
        self._talker = talker
        self._early = early

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self.lost:
            return await super().handle_async_request(request)
        self.lost += 1
        async with Nursery() as nursery:
            answering = nursery.start_task("answer", super().handle_async_request(request))
            if self._early:
                await self._talker.has_said(3)
                answering.cancel()
        if not self._early:
            await answering.result().aclose()
        raise httpx.ReadError("connection lost")


@pytest.mark.parametrize("early", [True, False])
async def test_a_client_that_tries_again_gets_the_same_answer_and_nothing_is_sampled_twice(
    early: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.0)
    async with asked(lines("Hello.", "a second sample"), decode_step_s=0.001) as a:
        transport = Dropping(a.talker, early=early)
        async with client_of(a.access, transport=transport, max_retries=2) as client:
            answer = await client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "Hi"}]
            )
        trajectory = await a.trajectory()
    assert transport.lost == 1
    assert answer.choices[0].message.content == "Hello."
    assert len(a.talker.prompts) == 1
    counts = [a.bench.counted("openai_requests_total", result=r) for r in ("answered", "repeated", "another")]
    assert counts == [1, 1, 0]
    assert trajectory.num_sampled_tokens == len("Hello.") + 1


async def test_an_agent_that_stopped_waiting_and_asks_again_gets_the_undelivered_answer():
    async with asked(lines("Hello."), decode_step_s=0.001) as a, Nursery() as nursery:
        impatient = nursery.start_task("impatient", a.say("Hi"))
        await a.talker.has_said(2)
        impatient.cancel()
        await asyncio.wait([impatient])
        assert (await a.say("Hi")).choices[0].message.content == "Hello."
    assert len(a.talker.prompts) == 1


async def test_another_conversation_is_refused_with_the_remedy_when_there_may_be_no_more():
    async with asked(lines("Hello.", "never said")) as a:
        first = await a.say("Hi")
        for said, tools, why in (
            ({"role": "assistant", "content": "Something else."}, [], "its history was edited"),
            (reply(first), [WEATHER], "its tools differ from those of the conversation"),
        ):
            with pytest.raises(
                openai.BadRequestError, match=rf"{why}.* raise rollout\.max_branches"
            ) as refused:
                await a.say("Hi", said, "Go on", tools=tools)
            assert refused.value.code == "too_many_conversations"


async def test_parts_of_another_type_are_left_out_of_the_policys_own_messages_only():
    thought = {"type": "reasoning", "text": "?"}
    async with asked(lines("Hello.", "Again.")) as a:
        await a.say({"role": "user", "content": [thought]})
        parts = [thought, {"type": "thinking", "thinking": "?"}, {"type": "text", "text": "Hello."}]
        await a.say("?", {"role": "assistant", "content": parts}, "Go on")


@pytest.mark.parametrize(
    "history",
    [
        pytest.param(["Hi", {"role": "assistant", "content": "Edited."}, "Go on"], id="edited answer"),
        pytest.param([{"role": "system", "content": "Be brief."}, "Hi"], id="another system prompt"),
        pytest.param(["In short: we greeted each other.", "Go on"], id="summarised"),
    ],
)
async def test_another_history_is_another_conversation_with_its_own_tokens(history: list[Any]):
    async with asked(lines("Hello.", "Second.", "Third."), max_branches=4) as a:
        first = await a.say("Hi")
        await a.say(*history)
        await a.say("Hi", reply(first), "And now?")  # the first continues where it was
    main, other = await a.trajectories()
    assert main.trajectory_id + ".1" == other.trajectory_id
    written = [a.bench.chat.decode(t.token_ids[t.response_mask]) for t in (main, other)]
    assert written == ["Hello.Third.", "Second."]
    assert other.num_inherited == 0
    assert a.bench.session.completion.text == "Third."
    assert [session.completion.text for session in a.bench.session.tree] == ["Third.", "Third."]


async def test_sub_agents_run_side_by_side_and_each_goes_on_in_its_own_conversation():
    def script(prompt: str) -> str:
        count = prompt.count("<|im_start|>assistant") - 1
        return f"{prompt.split('name ')[1].split('.')[0]} says {count}"

    async with asked(script, max_branches=3, decode_step_s=0.001) as a:

        async def sub_agent(name: str) -> list[str]:
            messages: list[Any] = [{"role": "system", "content": f"Your name {name}."}]
            for _ in range(3):
                messages.append({"role": "user", "content": "Next?"})
                messages.append(reply(await a.say(*messages)))
            return [m["content"] for m in messages if m["role"] == "assistant"]

        async with Nursery() as nursery:
            running = [nursery.start_task(name, sub_agent(name)) for name in ("ann", "bob", "cid")]
        assert [task.result() for task in running] == [
            [f"{name} says {n}" for n in range(3)] for name in ("ann", "bob", "cid")
        ]
    trajectories = await a.trajectories()
    assert sorted(t.outcome.num_turns for t in trajectories) == [3, 3, 3]
    assert all(t.trace is not None and t.trace.valid.all() for t in trajectories)


async def test_the_same_question_is_sampled_again_when_it_is_asked_on_purpose():
    async with asked(lambda prompt: "Six.", max_branches=2) as a:
        for _ in range(3):
            assert (await a.say("Dice?")).choices[0].message.content == "Six."
    trajectories = await a.trajectories()
    assert [t.num_sampled_tokens for t in trajectories] == [len("Six.") + 1] * 3


@pytest.mark.parametrize("interrupt", ["abort", "retract"])
async def test_a_weight_update_is_invisible_when_it_comes_in_the_middle_of_a_stream(interrupt: Any):
    text = "All my little ducklings, swimming on the lake"
    async with asked(lines(text), decode_step_s=0.001, interrupt=interrupt) as a:
        said, updated = "", False
        async for chunk in await a.say("Sing", stream=True):
            said += chunk.choices[0].delta.content or ""
            if len(said) >= 5 and not updated:
                updated = True
                assert len(said) < len(text)  # the text was reported as it grew
                await a.bench.bump(1)
        trajectory = await a.trajectory()
    assert said == text
    assert [segment.weight_version for segment in trajectory.sampled] == [0, 1]
    assert trajectory.outcome.num_interruptions == 1


TOOL_RESULT = {"role": "tool", "tool_call_id": "1", "content": "rain"}
IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}


@pytest.mark.parametrize(
    ("body", "place", "words"),
    [
        ({"messages": [{"role": [], "content": "x"}]}, "messages[0].role", ""),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0]", "role is 'robot'"),
        ({"messages": [IMAGE]}, "messages[0].content", "only text"),
        ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages[0].tool_calls", ""),
        ({"messages": [TOOL_RESULT | {"name": ["weather"]}]}, "messages[0].name", ""),
        ({"messages": [TOOL_RESULT | {"tool_call_id": {}}]}, "messages[0].tool_call_id", ""),
        ({"messages": [{"role": "user", "content": "x"}] * 10_001}, "messages", ""),
        ({"stop": [["x"]]}, "stop[0]", ""),
        ({"stop": ["x"] * 65}, "stop", ""),
        ({"stop": [""]}, "stop", "stop must be a string or a list"),
        ({"tools": [{"type": "function", "function": {"name": ["weather"]}}]}, "tools[0]", ""),
        ({"tools": [{"type": "function", "function": {"name": "f", "x": [0] * 300_000}}]}, "tools[0]", ""),
        ({"tools": [{"type": "custom"}]}, "tools[0]", "expected a function"),
        ({"functions": [{"name": "f"}]}, "functions", "use tools"),
        ({"temperature": {}}, "temperature", ""),
        ({"max_tokens": 0}, "max_tokens", "max_tokens is 0, expected a whole number of at least 1"),
        ({"logprobs": True, "top_logprobs": 3}, "top_logprobs", "is not supported"),
        ({"n": 2}, "n", "n is 2, expected 1"),
        (b'{"model": "policy", "messages": [], "seed": ' + b"9" * 5000 + b"}", "seed", ""),
        (b"[", None, ""),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_a_malformed_request_is_refused_by_place_and_its_trajectory_goes_on(
    body: Any, place: str | None, words: str
):
    async with asked(lines("Hello.")) as a:
        if isinstance(body, dict):
            request = {"model": "policy", "messages": [{"role": "user", "content": "x"}]} | body
            body = json.dumps(request).encode()
        key = {"Authorization": f"Bearer {a.access.api_key}"}
        async with httpx.AsyncClient(trust_env=False) as client:
            url = f"{a.access.base_url}/chat/completions"
            answer = await client.post(url, content=body, headers=key)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", place)
        assert words in error["message"]
        assert a.talker.prompts == []
        assert a.bench.counted("openai_requests_total", result="refused") == 1
        assert (await a.say("Hi")).choices[0].message.content == "Hello."


async def test_names_of_an_agents_tools_make_a_bounded_number_of_time_series():
    async with asked(lambda prompt: "Hello.", max_branches=2) as a:
        for turn in range(3):
            names = [f"tool {turn} {number}" for number in range(50)]
            tools = [{"type": "function", "function": {"name": name}} for name in names]
            results = [TOOL_RESULT | {"name": name} for name in names]
            await a.say("Hi", *results, tools=tools)
        # More than one request may offer.
        a.bench.session.record_tool_call(error=False, tool="x" * 1000)
        found = {
            sample.labels["tool"]
            for family in a.bench.metrics.registry.collect()
            for sample in family.samples
            if "tool" in sample.labels
        }
        assert len(found) == 101
        assert a.bench.counted("tool_calls_total", tool="other", status="ok") == 51


# -- what the OpenAI endpoint costs -------------------------------------------------------------------


Ask = Callable[..., Awaitable[Exchange]]


@asynccontextmanager
async def traced_conversation(session: ScriptedSession) -> AsyncIterator[Ask]:
    """Answers the requests of a trajectory and counts the bytes that are allocated meanwhile."""
    handler = RequestHandler(
        session, reader=None, opens_thought=False, ignores_constraints=False, on_ignored=lambda _: None
    )

    async def ask(messages: list[dict[str, Any]]) -> Exchange:
        chat = ChatCompletions().read(
            json.dumps({"model": "policy", "messages": messages}).encode(), "policy"
        )
        exchange = handler.submit_request(chat, message_digests(chat.messages), retry_count=None)
        while not exchange.ended:
            await exchange.changed.wait()
        return exchange

    gc.collect()
    tracemalloc.start()
    try:
        async with Nursery() as nursery:
            nursery.start_task("requests", handler.serve_requests())
            yield ask
            handler.close()
    finally:
        tracemalloc.stop()


def bytes_held() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


async def bytes_after_turns(num_turns: int) -> int:
    """Return what a trajectory holds after turns of 2 kB, each request with all messages so far."""
    session = ScriptedSession(*(f"{number} {'y' * 1000}" for number in range(num_turns)))
    messages: list[dict[str, Any]] = []
    async with traced_conversation(session) as ask:
        for number in range(num_turns):
            messages.append({"role": "user", "content": f"{number} {'x' * 1000}"})
            exchange = await ask(messages)
            assert exchange.answer is not None
            messages.append(exchange.answer.message)
        assert sum(len(str(message["content"])) for message in session.messages) > 2000 * num_turns
        return bytes_held()


@pytest.mark.real
async def test_memory_of_a_conversation_grows_with_its_turns_when_each_request_repeats_them_all() -> None:
    await bytes_after_turns(2)  # what is held once
    few, many = await bytes_after_turns(20), await bytes_after_turns(80)
    assert many < 6 * few


async def test_error_is_told_again_when_a_failed_request_is_repeated() -> None:
    session = ScriptedSession("Hello.")
    handler = RequestHandler(
        session, reader=None, opens_thought=False, ignores_constraints=False, on_ignored=lambda _: None
    )
    body = {"model": "policy", "messages": [{"role": "user", "content": "x" * (1 << 17)}]}
    chat, other = (
        ChatCompletions().read(json.dumps(each).encode(), "policy") for each in (body, body | {"top_p": 0.5})
    )
    first, again, with_another_parameter = (
        handler.submit_request(each, message_digests(each.messages), retry_count=None)
        for each in (chat, chat, other)
    )
    assert again is first
    assert with_another_parameter is not first
    handler.close()


async def test_agents_reach_the_endpoint_when_the_environment_names_a_proxy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with (
        Endpoint().open_trajectory(ScriptedSession("Hello."), reader=None) as access,
        aclosing(AgentAPI(access)) as api,
    ):
        answer = await api.client.chat.completions.create(
            model=api.model, messages=[{"role": "user", "content": "Hi"}]
        )
    assert answer.choices[0].message.content == "Hello."
