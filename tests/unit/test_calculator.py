import pytest

from agent_loops.calculator import calculator


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("37 * 45", "1665"),
        ("-(2 + 3) * 4", "-20"),
        ("7 // 2 + 7 % 4", "6"),
        ("1 / 4", "0.25"),
        ("2 ** -1", "0.5"),
        ("9" * 60 + " + 1", "1" + "0" * 60),
    ],
)
def test_expression_is_evaluated_when_it_is_arithmetic(expression: str, result: str):
    assert calculator(expression) == result


@pytest.mark.parametrize(
    "expression", ["", "2 +", "(1, 2)", "__import__('os')", "True", "1e5", "(-8) ** 0.5", "(" * 199]
)
def test_value_error_when_the_expression_is_not_arithmetic(expression: str):
    with pytest.raises(ValueError, match=r"arithmetic|only numbers|negative number"):
        calculator(expression)


@pytest.mark.parametrize(
    "expression",
    ["9 ** 9 ** 9", "(10 ** 100) * (10 ** 100)", "2.0 ** 10000", "(" * 90 + "1" + ")" * 90 + "+" * 30],
)
def test_value_error_when_the_expression_is_too_large(expression: str):
    with pytest.raises(ValueError, match=r"too large|characters"):
        calculator(expression)


def test_division_by_zero_is_reported_as_such():
    with pytest.raises(ZeroDivisionError):
        calculator("1 / (2 - 2)")
