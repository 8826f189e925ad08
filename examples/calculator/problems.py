"""The task of the quickstart: arithmetic that a tiny model cannot do without a calculator."""

from __future__ import annotations

from typing import Any

import numpy as np

from agent_loops.calculator import calculator
from agent_loops.tools import Tool

TOOLS = [Tool(calculator).schema]


def draw_expressions(count: int, rng: np.random.Generator) -> list[str]:
    """Draw different products of a three-digit and a two-digit number, such as `374 * 52`."""
    expressions: dict[str, None] = {}
    while len(expressions) < count:
        expressions[f"{rng.integers(100, 1000)} * {rng.integers(10, 100)}"] = None
    return list(expressions)


def question(expression: str) -> list[dict[str, Any]]:
    """Return the messages with which a task begins."""
    return [{"role": "user", "content": f"What is {expression}?"}]


def direct_answer(expression: str) -> list[dict[str, Any]]:
    """Return the rest of a conversation without the tool."""
    return [{"role": "assistant", "content": f"{expression} = {calculator(expression)}."}]


def answer_with_tool(expression: str) -> list[dict[str, Any]]:
    """Return the rest of a conversation that uses the calculator first."""
    function = {"name": "calculator", "arguments": {"expression": expression}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "name": "calculator", "content": calculator(expression)},
        *direct_answer(expression),
    ]
