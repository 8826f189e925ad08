"""Token in, token out, for the chat templates of model families: what a session builds is what is rendered.

Where it is not, the template writes earlier turns anew, and `find_rewrite` says how.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.data.chat_format import ChatFormat
from async_rl.data.template_rewrites import find_rewrite
from tests.support.templates_of_models import APPEND_ONLY, TEMPLATES, chat_of

WORDS = st.text("ab the42.,é", min_size=1, max_size=12).map(str.strip).filter(bool)
ANY = st.text("ab \n.{}\"'é<>4", min_size=1, max_size=12)
CALL = st.builds(
    lambda name, value: f'<tool_call>\n{{"name": "{name}", "arguments": {{"a": {value}}}}}\n</tool_call>',
    st.sampled_from(["add", "search"]),
    st.integers(0, 99),
)
TOOLS = st.lists(
    st.builds(lambda text: {"type": "function", "function": {"name": "f", "description": text}}, WORDS),
    max_size=2,
)


def answers(text: st.SearchStrategy[str], thoughts: bool) -> st.SearchStrategy[str]:
    """What a policy writes: words, calls (side by side, or beside words), with thoughts before them."""
    said = st.one_of(text, st.lists(CALL, min_size=1, max_size=2).map("\n".join))
    if not thoughts:
        return said
    thought = st.builds("<think>\n{}\n</think>\n\n{}".format, WORDS, said)
    return st.one_of(said, thought)


@st.composite
def conversations(draw: st.DrawFn, text: st.SearchStrategy[str], *, thoughts: bool) -> list[dict[str, Any]]:
    """Perhaps a system message; a question; turns, each followed by a question or by results."""
    messages = [{"role": "system", "content": draw(text)}] if draw(st.booleans()) else []
    messages.append({"role": "user", "content": draw(text)})
    for _ in range(draw(st.integers(1, 4))):
        messages.append({"role": "assistant", "content": draw(answers(text, thoughts))})
        if draw(st.booleans()):
            messages.append({"role": "user", "content": draw(text)})
        else:
            messages += [{"role": "tool", "content": draw(text)} for _ in range(draw(st.integers(1, 3)))]
    return messages


def prompts(chat: ChatFormat, messages: Sequence[dict[str, Any]], tools: Any) -> list[tuple[Any, Any]]:
    """What the policy is given before each turn but the first: as a session has it, and as rendered."""
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    built = chat.prompt_ids(messages[: turns[0]], tools)
    pairs = []
    for index, end in zip(turns, [*turns[1:], len(messages)], strict=True):
        wrote = [*chat.encode(messages[index]["content"]).tolist(), chat.end_of_turn_id]
        built = np.concatenate([built, wrote, chat.append_ids(messages[index + 1 : end])])
        rendered = chat.tokenizer.apply_chat_template(
            list(messages[:end]), tools=tools or None, tokenize=False, add_generation_prompt=True
        )
        pairs.append((built.tolist(), chat.encode(rendered).tolist()))
    return pairs


def rewrites(chat: ChatFormat, messages: Sequence[dict[str, Any]]) -> list[str]:
    """What `find_rewrite` says of each turn."""
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    return [
        find_rewrite(chat, messages[:index], messages[index]["content"], messages[index + 1 : end])
        for index, end in zip(turns, [*turns[1:], len(messages)], strict=True)
    ]


@pytest.mark.parametrize("name", TEMPLATES)
@given(messages=conversations(WORDS, thoughts=False), tools=TOOLS)
@settings(max_examples=25, deadline=None)
def test_what_is_built_is_what_is_rendered_when_no_turn_has_a_thought(
    name: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> None:
    chat = chat_of(name)
    for built, rendered in prompts(chat, messages, tools):
        assert built == rendered
    assert not any(rewrites(chat, messages))


@pytest.mark.real
@pytest.mark.parametrize("name", TEMPLATES)
@given(messages=conversations(ANY, thoughts=True))
@settings(max_examples=40, deadline=None)
def test_the_first_difference_is_reported_and_nothing_else_when_turns_are_written_anew(
    name: str, messages: list[dict[str, Any]]
) -> None:
    chat = chat_of(name)
    differ = [built != rendered for built, rendered in prompts(chat, messages, [])]
    found = rewrites(chat, messages)
    assert any(found) == any(differ)
    if any(differ):
        assert [bool(text) for text in found].index(True) == differ.index(True)
    if name in APPEND_ONLY:  # the text is that of the session; only where it is cut into tokens may differ
        assert all(
            not text or text.endswith("is tokenised differently next to its neighbours") for text in found
        )


def test_a_dropped_thought_is_quoted_when_qwen3_renders_an_earlier_turn() -> None:
    asked, answer = [{"role": "user", "content": "2 + 2?"}], "<think>\nfour\n</think>\n\nIt is 4."
    found = find_rewrite(chat_of("qwen3"), asked, answer, [{"role": "user", "content": "Sure?"}])
    assert found == f"the template renders 'It is 4.' for what the policy wrote as {answer!r}"
    # A tool's result alone does not take thoughts away.
    assert not find_rewrite(chat_of("qwen3"), asked, answer, [{"role": "tool", "content": "4"}])
