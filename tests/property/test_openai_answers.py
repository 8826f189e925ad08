"""What is streamed adds up to what is answered, however a text is cut."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from agent_loops.openai_agent import CallReader
from agent_loops.parsing import load_parser
from async_rl.openai_api.answers import TurnFormat, split_turn
from async_rl.rollout.session.tokens import GrowingText
from tests.support.talk import ByteTokenizer

PIECES = st.sampled_from(
    [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        '{"name": "f", "arguments": {}}',
        "END",
        " \n",
        "a<b ",
    ]
)
TEXTS = st.lists(PIECES | st.text(max_size=3), max_size=8).map("".join)
FORMS = st.builds(
    TurnFormat,
    stop=st.sampled_from([(), ("END",), ("<b", "ND")]),
    reader=st.sampled_from([None, CallReader(load_parser("hermes"))]),
    opens_thought=st.booleans(),
)


@settings(max_examples=60)
@given(TEXTS, FORMS)
def test_what_is_shown_of_a_beginning_begins_what_is_shown_of_all(text: str, form: TurnFormat):
    whole = split_turn(text, form, complete=True)
    reasoning, content = "", ""
    for end in range(len(text) + 1):
        part = split_turn(text[:end], form, complete=False)
        assert (part.reasoning or "").startswith(reasoning)
        assert part.content.startswith(content)
        reasoning, content = part.reasoning or "", part.content
    assert (whole.reasoning or "").startswith(reasoning)
    assert whole.content.startswith(content)


@settings(max_examples=60)
@given(st.lists(st.binary(max_size=3) | st.text(max_size=2).map(str.encode), max_size=12))
def test_text_grows_to_what_all_tokens_decode_to_when_they_come_in_pieces(chunks: list[bytes]):
    told: list[str] = []
    decode = ByteTokenizer().decode
    growing = GrowingText(decode, told.append)
    for chunk in chunks:
        growing.add_tokens(list(chunk))
    whole = decode(list(b"".join(chunks)))
    assert whole.startswith("".join(told))
    if not whole.endswith("\N{REPLACEMENT CHARACTER}"):  # else it waits for the rest of a character
        assert "".join(told) == whole
