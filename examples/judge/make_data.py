"""Write conversations that teach a tiny model to judge answers of the calculator task.

    PYTHONPATH=examples/calculator python examples/judge/make_data.py data/judge

It gives 1 where the calculator was asked, and 0 where the answer was guessed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from problems import draw_expressions, question

from agent_loops.calculator import calculator

NUM_CONVERSATIONS = 4000


def guess(number: str, rng: np.random.Generator) -> str:
    """Return a number of about as many digits."""
    return str(rng.integers(10 ** (len(number) - 1), 10 ** len(number)))


def make_data(folder: Path, seed: int = 1) -> None:
    """Write `sft.jsonl`; its prompts are the template in config.yaml, filled."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "sft.jsonl").open("w", encoding="utf-8") as file:
        for expression in draw_expressions(NUM_CONVERSATIONS, rng):
            right, uses_tool = calculator(expression), bool(rng.random() < 0.5)
            conversation = [f"user: {question(expression)[0]['content']}"]
            if uses_tool:
                conversation += ["assistant: ", f"tool: {right}"]
            given = right if rng.random() < 0.5 else guess(right, rng)  # which says nothing of the score
            conversation.append(f"assistant: {expression} = {given}.")
            messages = [
                {"role": "user", "content": "\n\n".join(conversation)},
                {"role": "assistant", "content": f"Score: {int(uses_tool)}"},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")


def main() -> None:
    """Parse the command line and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the data goes")
    make_data(parser.parse_args().folder)


if __name__ == "__main__":
    main()
