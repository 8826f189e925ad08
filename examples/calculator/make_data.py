"""Write the quickstart's data: tasks for RL, and conversations for the warm start.

    python examples/calculator/make_data.py data/calculator

`tasks.jsonl` has questions with their answers. `sft.jsonl` has conversations that show the format: some ask
the calculator, the others answer at once. A model trained on them calls the tool as often as they
do, so that RL has something to find out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from problems import TOOLS, answer_with_tool, direct_answer, draw_expressions, question

from agent_loops.calculator import calculator

NUM_TASKS = 2000
NUM_CONVERSATIONS = 8000
TOOL_SHARE = 0.33
"""Share of the warm start's conversations that use the calculator."""


def task_rows(expressions: Iterable[str]) -> Iterable[dict[str, Any]]:
    """Draw questions with their answers."""
    for index, expression in enumerate(expressions):
        yield {
            "id": f"calculator-{index}",
            "messages": question(expression),
            "answer": calculator(expression),
            "expression": expression,
        }


def sft_rows(expressions: Iterable[str], rng: np.random.Generator) -> Iterable[dict[str, Any]]:
    """Return conversations with the tools that are available in them."""
    for expression in expressions:
        rest = answer_with_tool if rng.random() < TOOL_SHARE else direct_answer
        yield {"messages": question(expression) + rest(expression), "tools": TOOLS}


def make_data(folder: Path, seed: int = 0) -> None:
    """Write both files; the warm start contains none of the tasks."""
    rng = np.random.default_rng(seed)
    expressions = draw_expressions(NUM_TASKS + NUM_CONVERSATIONS, rng)
    folder.mkdir(parents=True, exist_ok=True)
    _write_jsonl(folder / "tasks.jsonl", task_rows(expressions[:NUM_TASKS]))
    _write_jsonl(folder / "sft.jsonl", sft_rows(expressions[NUM_TASKS:], rng))


def _write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    print(f"wrote {path}")


def main() -> None:
    """Parse the command line and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the data goes")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make_data(arguments.folder, arguments.seed)


if __name__ == "__main__":
    main()
