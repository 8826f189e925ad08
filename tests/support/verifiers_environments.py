"""Environments of verifiers for tests, which the environment's process loads: they need the package."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import verifiers
from datasets import Dataset


class Echo(verifiers.MultiTurnEnv):
    """Answers with what the policy wrote, and does what some words say."""

    def __init__(self, folder: str, **kwargs: Any) -> None:
        def length(completion: Any) -> float:
            """Score the last answer of the policy."""
            last = [message for message in completion if message.role == "assistant"][-1].content
            if last == "unscored":
                raise ValueError(f"no score for {last!r}")
            return float("nan") if last == "odd" else float(len(last))

        rubric = verifiers.Rubric(funcs=[length], weights=[0.5])
        dataset = Dataset.from_list([{"question": "Say.", "answer": ""}])
        super().__init__(dataset=dataset, rubric=rubric, max_turns=3, **kwargs)
        self.folder = Path(folder)
        # Neither ends with the main thread.
        threading.Thread(target=threading.Event().wait).start()

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        said = messages[-1].content
        if said == "raise":
            raise RuntimeError("the dice fell off the table")
        if said == "refuse":
            raise verifiers.ToolError("the dice are loaded")
        if said == "die":
            os._exit(3)
        print("not a line of ours")
        return [verifiers.UserMessage(content=f"You said {said}.")]

    @verifiers.cleanup
    async def note_end(self, state: Any) -> None:
        with (self.folder / "ended").open("a") as log:
            log.write(f"{len(state['trajectory'])}\n")

    @verifiers.teardown
    async def note_teardown(self) -> None:
        (self.folder / "torn_down").touch()


def weather(city: str) -> str:
    """Tell the weather.

    Args:
        city: Where.
    """
    return f"{city}: rain"


def tools() -> verifiers.Environment:
    """Return an environment with a tool."""

    def told(completion: Any) -> float:
        return float("rain" in completion[-1].content)

    return verifiers.ToolEnv(
        tools=[weather],
        dataset=Dataset.from_list([{"question": "Weather in Oslo?", "answer": "rain"}]),
        rubric=verifiers.Rubric(funcs=[told]),
    )
