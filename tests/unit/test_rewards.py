import math
from typing import Any

import pytest
from msgspec.structs import replace

from agent_loops.rewards import exact_match, last_number
from async_rl.types import Completion
from tests.support.scripted_session import make_task


def completion(text: str) -> Completion:
    return Completion(messages=[], text=text, stop_reason="completed")


@pytest.mark.parametrize(
    ("answer", "text", "reward"),
    [
        ("yes", " yes\n", 1.0),
        ("yes", "Yes", 0.0),
        (42, "42", 1.0),
        (42.0, "42", 1.0),
        (1e-05, "0.00001", 1.0),
        (True, "True", 1.0),
        pytest.param(10**5000, "1" + "0" * 5000, 1.0, id="long and right"),
        ("yes", "", 0.0),
    ],
)
def test_exact_match_forgives_nothing_but_white_space(answer: object, text: str, reward: float):
    assert exact_match(make_task(answer=answer), completion(text)) == reward


THOUSANDS = ("10,000", "10,\\!000", "10{,}000", "10\\,000", "10 000.", "10\u00a0000", "10\u202f000", "10'000")
POWERS = ("10\u2075", "1.0 \u00d7 10\u2075", "1\u00b710^5", "1\u22c510^{5}", "1,00,000")


@pytest.mark.parametrize(
    ("answer", "text", "reward"),
    [
        ("1665", "37 * 45 = 1665.", 1.0),
        ("1665", "1665, I said; no, 1666.", 0.0),
        (1665, "The answer is 1,665!", 1.0),
        ("-12", "It is -12", 1.0),
        ("12", "It is -12", 0.0),
        ("3", "10-3", 1.0),
        ("so it is\n#### 42", "42", 1.0),
        ("0.333333", "0.3333331", 1.0),
        ("0.333333", "0.334", 0.0),
        ("1234567", "1234568", 0.0),
        ("1234567", "1234567.0", 1.0),
        ("12", "1,2", 0.0),
        ("5", "no number", 0.0),
        ("1/2", "3/2", 0.0),
        ("1/2", "0.5", 1.0),
        ("1/2", r"so it is \frac{1}{2}", 1.0),
        ("3/2", "1 1/2", 1.0),
        ("2/4", "1 / 2", 1.0),
        ("1e5", "1e6", 0.0),
        ("1e5", "100,000", 1.0),
        ("300000", "3 x 10^5", 1.0),
        ("1024", "2**10", 1.0),
        (".5", "5", 0.0),
        ("0.5", "it is .5.", 1.0),
        ("-3", "it is \u22123", 1.0),
        ("18", r"costs \$18", 1.0),
        ("18", "costs -$18", 0.0),
        ("1000000", "1_000_000", 1.0),
        ("10", "1/0", 0.0),
        ("7", "7^99999999", 0.0),
        ("7", "1e999999999", 0.0),
        *(("10000", text, 1.0) for text in THOUSANDS),
        *(("20000", text, 0.0) for text in THOUSANDS),
        ("1'234'567", "12,34,567", 1.0),
        ("3", "1 2 3", 1.0),
        ("20", "10 20", 1.0),
        ("28", "3 125/5", 1.0),
        *(("3/2", text, 1.0) for text in (r"1\frac{1}{2}", r"1 \frac{1}{2}", "1\u00bd")),
        *(("1/2", text, 1.0) for text in ("\u00bd", r"\frac 1 2", r"\frac{1}2", r"\dfrac12", "1\u20442")),
        *(
            ("-3/4", text, 1.0)
            for text in ("(-3)/4", r"\frac{3}{-4}", "-(3/4)", r"-\left(\frac{3}{4}\right)")
        ),
        ("3/4", r"\frac{-3}{-4}", 1.0),
        *(("10", text, 0.0) for text in POWERS),
        *(("100000", text, 1.0) for text in POWERS),
        ("0.001", "10\u207b\u00b3", 1.0),
        *(
            ("5", text, 1.0)
            for text in ("\u662f5", "\u043e\u04425", "No.5", "it is...5", "5 cm^2", "**42** 5")
        ),
        pytest.param(10**5000, "5", 0.0, id="long"),
        pytest.param(10**5000, "1" + "0" * 5000, 1.0, id="long and right"),
        (1e22, "10^22", 1.0),
        (7, "12 <think>7", 0.0),
        ("3", "<think>3</think> 4", 0.0),
    ],
)
def test_last_number_compares_values(answer: object, text: str, reward: float):
    assert last_number(make_task(answer=answer), completion(text)) == reward


@pytest.mark.parametrize("reward", [last_number, exact_match])
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, r"the task has no answer: set data\.keys\.answer"),
        ("", "the task has no answer"),
        (" \n", "the task has no answer"),
        (math.nan, "the task has no answer"),
        ([], "is a list; expected text or a number"),
        ({}, "is a dict; expected text or a number"),
        (["4"], "is a list; expected text or a number"),
    ],
)
def test_an_answer_that_is_missing_or_no_text_is_an_error(reward: Any, answer: Any, words: str):
    with pytest.raises(ValueError, match=words):
        reward(make_task(answer=answer), completion(str(answer)))


def test_an_answer_without_a_number_is_an_error():
    with pytest.raises(ValueError, match="'no number' has no number"):
        last_number(make_task(answer="no number"), completion("5"))


@pytest.mark.parametrize("reward", [last_number, exact_match])
def test_nothing_of_a_thought_that_was_cut_off_is_an_answer(reward: Any):
    cut = Completion(messages=[], text="5", stop_reason="length", is_in_thought=True)
    assert reward(make_task(answer="5"), cut) == 0.0
    ended = replace(cut, text="4</think>5")
    assert reward(make_task(answer="5"), ended) == 1.0
