from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.data.chat_format import ChatFormat, load_chat_format

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
