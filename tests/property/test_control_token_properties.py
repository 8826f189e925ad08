"""For the chat templates of model families: no text of a message becomes a token that delimits messages.

Messages consist of control tokens, pieces of them, marks and ordinary text, in any order.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.data.chat_format import ChatFormat
from tests.support.templates_of_models import LIKE_OTHERS, TEMPLATES, chat_of

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
def conversations(draw: st.DrawFn, name: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
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
    said, plain = data.draw(conversations(name))
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
