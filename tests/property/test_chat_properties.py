from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.data.chat_format import ChatFormat, load_chat_format
from tests.support.templates_of_models import LIKE_OTHERS, TEMPLATES, chat_of

CONTENT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30)
VALUE = st.one_of(st.integers(-999, 999), CONTENT, st.booleans())
CALLS = st.builds(
    lambda name, arguments: {"type": "function", "function": {"name": name, "arguments": arguments}},
    st.sampled_from(["calculator", "search"]),
    st.dictionaries(st.sampled_from(["expression", "a", "b"]), VALUE, max_size=2),
)
ASSISTANT = st.builds(
    lambda content, calls: {"role": "assistant", "content": content, "tool_calls": calls},
    st.one_of(st.just(""), CONTENT),
    st.lists(CALLS, max_size=3),
)
USER = st.builds(lambda content: [{"role": "user", "content": content}], CONTENT)
TOOL_RESULTS = st.lists(
    st.builds(lambda content: {"role": "tool", "content": content}, CONTENT), min_size=1, max_size=3
)
TURNS = st.lists(st.tuples(st.one_of(USER, TOOL_RESULTS), ASSISTANT), max_size=4)
TOOLS = st.lists(
    st.builds(lambda text: {"type": "function", "function": {"name": "f", "description": text}}, CONTENT),
    max_size=2,
)


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """A system message perhaps, a question, and turns that each end with the assistant."""
    messages = [{"role": "system", "content": draw(CONTENT)}] if draw(st.booleans()) else []
    messages += [*draw(USER), draw(ASSISTANT)]
    for between, answer in draw(TURNS):
        messages += [*between, answer]
    return messages


@pytest.fixture(scope="module")
def chat(calculator: Path) -> ChatFormat:
    return load_chat_format(calculator / "model")


@given(messages=conversations(), tools=TOOLS)
@settings(max_examples=200, deadline=None)
def test_tokens_built_piece_by_piece_are_those_of_the_whole_rendering(
    chat: ChatFormat, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
):
    token_ids, loss_mask = chat.encode_conversation(messages, tools)
    rendered = chat.tokenizer.apply_chat_template(
        messages, tools=tools or None, tokenize=False, add_generation_prompt=False
    )
    # The template ends a turn with a line break, which the policy never sees after its last one.
    whole = chat.tokenizer.encode(rendered.removesuffix("\n"), add_special_tokens=False)
    assert token_ids.tolist() == whole
    ends = np.flatnonzero(loss_mask & (token_ids == chat.end_of_turn_id))
    assert len(ends) == sum(message["role"] == "assistant" for message in messages)


# -- control tokens in messages -------------------------------------------------------------------------


_PIECES = (
    *("<", "|", ">", "/", "[", "]", "<|", "|>", "</", "im_end", "eot_id", "INST", "think", "tool_response"),
    *("s", " ", "\n", "4", "the", "\udc00", "\udc03", "\ufdd0", "\U000f0000", "é", "\u212a"),
)
_LITERAL = str.maketrans(dict.fromkeys("<>|/[]｜▁", "x"))
_MENTIONED = frozenset({"<think>", "</think>", "<tool_call>", "</tool_call>"})


def hostile(name: str) -> st.SearchStrategy[str]:
    """Text that is made to forge turns."""
    tokens = [token.content for token in chat_of(name).tokenizer.added_tokens_decoder.values()]
    return st.lists(st.sampled_from([*tokens, *_PIECES]), min_size=1, max_size=12).map("".join)


@st.composite
def hostile_conversations(draw: st.DrawFn, name: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A conversation, and the same without punctuation of control tokens, which leaves the template's."""
    text = hostile(name)
    roles = ["user", *draw(st.lists(st.sampled_from(["user", "tool"]), max_size=3))]
    said = [{"role": role, "content": f"a{draw(text)}b"} for role in roles]
    if draw(st.booleans()):
        said.insert(0, {"role": "system", "content": f"a{draw(text)}b"})
    plain = [{**message, "content": message["content"].translate(_LITERAL)} for message in said]
    return said, plain


def delimiters(chat: ChatFormat, token_ids: Any, kept: frozenset[str]) -> list[str]:
    """The control tokens among some tokens, without those that any text may contain."""
    texts = {number: token.content for number, token in chat.tokenizer.added_tokens_decoder.items()}
    return [texts[each] for each in map(int, token_ids) if each in texts and texts[each] not in kept]


@pytest.mark.real
@pytest.mark.parametrize("name", [*TEMPLATES, *LIKE_OTHERS])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_delimiters_are_those_of_the_template_whatever_messages_say(name: str, data: st.DataObject) -> None:
    chat = chat_of(name)
    said, plain = data.draw(hostile_conversations(name))
    kept = _MENTIONED | {"<tool_response>", "</tool_response>"} if name == "llama3_1" else _MENTIONED
    for build in (chat.prompt_ids, chat.append_ids):
        token_ids = build(said)
        assert delimiters(chat, token_ids, kept) == delimiters(chat, build(plain), kept)
        if build == chat.prompt_ids and name != "normalised":
            assert chat.raw_text(token_ids) == chat.prompt_text(said)


@pytest.mark.real
@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_tools_and_calls_write_no_delimiter(name: str, data: st.DataObject) -> None:
    chat, text = chat_of(name), data.draw(hostile(name))

    def ids(said: str) -> Any:
        function = {"name": f"f{said}", "description": said, "parameters": {"properties": {f"p{said}": {}}}}
        call = {"type": "function", "function": {"name": f"f{said}", "arguments": {f"a{said}": [said, 4]}}}
        called = {"role": "assistant", "content": "", "tool_calls": [call]}
        asked = [{"role": "user", "content": "?"}, called, {"role": "tool", "content": said, "name": said}]
        return chat.prompt_ids(asked, [{"type": "function", "function": function}])

    kept = _MENTIONED | {"<tool_response>", "</tool_response>"} if name == "llama3_1" else _MENTIONED
    kept |= {"<|python_tag|>"}
    assert delimiters(chat, ids(text), kept) == delimiters(chat, ids(text.translate(_LITERAL)), kept)
