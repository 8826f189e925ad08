"""Questions to the models in `models`: async rewards, agent loops and tools import `ask_model`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from async_rl.errors import RolloutError

AskModel = Callable[..., Awaitable[str]]
"""Asks a model in `models`, with the arguments of `ask_model`."""

asking: ContextVar[AskModel] = ContextVar("asking")
"""What asks models in the current attempt."""


async def ask_model(
    model: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    max_new_tokens: int = 512,
    temperature: float = 0.0,
) -> str:
    """Return the answer of a model in `models`, for async rewards, agent loops and tools of the user's.

    The call waits for an engine of the model, and moves to another one when its engine fails.

    Example:
        >>> async def reward(task, completion):
        ...     question = f"Rate from 0 to 9 how polite this is: {completion.text}"
        ...     return float(await ask_model("judge", [{"role": "user", "content": question}])) / 9

    Raises:
        RolloutError: It is not called by an attempt of a run, or the model refuses the conversation.
        ConfigError: `models` does not have the model.
    """
    ask = asking.get(None)
    if ask is None:
        raise RolloutError(
            "ask_model is for async rewards, agent loops and tools of a run: in a thread or another process "
            "there is no event loop that could wait for the answer"
        )
    return await ask(model, messages, max_new_tokens=max_new_tokens, temperature=temperature)
