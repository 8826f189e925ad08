import pytest

from agent_loops.rewards import exact_match, last_number
from async_rl.types import Completion
from tests.support.scripted_session import make_task


def completion(text: str) -> Completion:
    return Completion(messages=[], text=text, stop_reason="completed")


@pytest.mark.parametrize(
    ("answer", "text", "reward"),
    [("yes", " yes\n", 1.0), ("yes", "Yes", 0.0), (42, "42", 1.0), ("yes", "", 0.0)],
)
def test_exact_match_forgives_nothing_but_white_space(answer: object, text: str, reward: float):
    assert exact_match(make_task(answer=answer), completion(text)) == reward


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
        ("no number", "5", 0.0),
        (None, "5", 0.0),
    ],
)
def test_last_number_compares_values(answer: object, text: str, reward: float):
    assert last_number(make_task(answer=answer), completion(text)) == reward
