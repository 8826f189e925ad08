"""Token in, token out, for the chat templates of model families: what a session builds is what is rendered.

Where it is not, the template writes earlier turns anew, and `rewrites` says which and how.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.data.chat_format import ChatFormat
from async_rl.data.template_rewrites import find_rewrites
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


@pytest.mark.parametrize("name", TEMPLATES)
@given(messages=conversations(WORDS, thoughts=False), tools=TOOLS)
@settings(max_examples=25, deadline=None)
def test_what_is_built_is_what_is_rendered_when_no_turn_has_a_thought(
    name: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> None:
    chat = chat_of(name)
    for built, rendered in prompts(chat, messages, tools):
        assert built == rendered
    assert find_rewrites(chat, messages, tools) == []


@pytest.mark.real
@pytest.mark.parametrize("name", TEMPLATES)
@given(messages=conversations(ANY, thoughts=True), tools=TOOLS)
@settings(max_examples=40, deadline=None)
def test_every_difference_is_reported_and_nothing_else_when_turns_are_written_anew(
    name: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> None:
    chat = chat_of(name)
    both = enumerate(prompts(chat, messages, tools), start=2)
    differ = {turn for turn, (built, rendered) in both if built != rendered}
    found = find_rewrites(chat, messages, tools)
    assert {rewrite.before_turn for rewrite in found} <= differ
    assert bool(found) == bool(differ)
    if differ:
        assert min(rewrite.before_turn for rewrite in found) == min(differ)
    if name in APPEND_ONLY:  # the text is that of the session; only where it is cut into tokens may differ
        assert all(rewrite.kept == rewrite.rendered for rewrite in found)


def test_the_turns_and_tokens_are_named_when_qwen3_drops_earlier_thoughts() -> None:
    chat = chat_of("qwen3")
    messages = [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "<think>\nfour\n</think>\n\n<tool_call>\n{}\n</tool_call>"},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "<think>\nso\n</think>\n\nIt is 4."},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "<think>\nyes\n</think>\n\nYes."},
        {"role": "user", "content": "Good."},
    ]
    found = find_rewrites(chat, messages)
    assert [(r.turn, r.before_turn, r.rendered) for r in found] == [
        (1, 3, "<tool_call>\n{}\n</tool_call>"),  # a tool's result alone does not take thoughts away
        (2, 3, "It is 4."),
        (3, 4, "Yes."),
    ]
    assert chat.decode(found[1].kept_ids) == "<think>\nso\n</think>\n\n"
    assert found[1].rendered_ids == ()
