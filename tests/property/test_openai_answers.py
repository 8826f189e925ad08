"""What is streamed adds up to what is answered, however a text is cut."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from agent_loops.parsing import load_parser
from async_rl.openai_api.answers import GrowingTurn, TurnFormat, split_turn
from async_rl.rollout.session.tokens import GrowingText
from tests.support.talk import ByteTokenizer

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
PIECES = st.sampled_from([*TAGS, '{"name": "f", "arguments": {}}', "END", " \n", "a<b "])
TEXTS = st.lists(PIECES | st.text(max_size=3), max_size=8).map("".join)
FORMS = st.builds(
    TurnFormat,
    stop=st.sampled_from([(), ("END",), ("<b", "ND")]),
    reader=st.sampled_from([None, load_parser("hermes")]),
    opens_thought=st.booleans(),
)


@settings(max_examples=200)
@given(TEXTS, FORMS, st.lists(st.integers(0, 60), max_size=4))
def test_what_is_shown_of_a_beginning_begins_what_is_shown_of_all(
    text: str, form: TurnFormat, cuts: list[int]
):
    whole = split_turn(text, form)
    by_character, in_pieces = GrowingTurn(form), GrowingTurn(form)
    shown = [by_character.add_text(character) for character in text]
    reasoning, content = "".join(r for r, _ in shown), "".join(c for _, c in shown)
    assert (whole.reasoning or "").startswith(reasoning)
    assert whole.content.startswith(content)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    shown = [in_pieces.add_text(text[a:b]) for a, b in pairwise(places)]
    assert reasoning == "".join(r for r, _ in shown)
    assert content == "".join(c for _, c in shown)
    if content and whole.reasoning is not None:
        assert reasoning == whole.reasoning


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
