"""A simulated engine that writes the answers of a test."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from async_rl.config import Config, SimulatedEngines
from async_rl.data.chat_format import ChatFormat, load_chat_format
from async_rl.engine_protocol import Engine
from async_rl.engines.model_facts import load_facts
from verification.simulation.breakable_engine import BreakableEngine, Fault

Answer = Callable[[str], str]
"""Converts the conversation so far, with special tokens, to the policy's next turn."""


class Writer:
    """A policy for `SimulatedEngine` that writes token by token what `answer` returns after each generation
    prompt.
    """

    def __init__(self, chat: ChatFormat, answer: Answer) -> None:
        self._chat = chat
        self._answer = answer
        asked = chat.prompt_ids([{"role": "user", "content": "?"}]).tolist()
        told = chat.tokenizer.apply_chat_template(
            [{"role": "user", "content": "?"}], tools=None, tokenize=False, add_generation_prompt=False
        )
        self._prompt = asked[len(chat.tokenizer.encode(told, add_special_tokens=False)) :]
        self._replies: dict[tuple[int, ...], list[int]] = {}
        self.written = 0
        """Tokens of the turn that was asked for last."""

    def __call__(self, prefix: Sequence[int], rng: random.Random) -> int | None:
        ids, length = list(prefix), len(self._prompt)
        begin = next(i for i in range(len(ids), 0, -1) if ids[i - length : i] == self._prompt)
        key = tuple(ids[:begin])
        if key not in self._replies:
            text = self._chat.tokenizer.decode(
                ids[:begin], skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
            self._replies[key] = self._chat.tokenizer.encode(self._answer(text), add_special_tokens=False)
        reply, self.written = self._replies[key], len(ids) - begin
        return reply[self.written] if self.written < len(reply) else self._chat.end_of_turn_id


def writing(
    answer: Answer, *faults: Fault
) -> Callable[[Config, Path], AbstractAsyncContextManager[list[Engine]]]:
    """Replace `try_out.engines_from`: opens one engine that writes these answers."""

    @asynccontextmanager
    async def open_engines(config: Config, log_dir: Path) -> AsyncIterator[list[Engine]]:
        engine = BreakableEngine(
            "engine-0",
            SimulatedEngines(decode_step_s=0.0, prefill_tokens_per_s=1e9),
            policy=Writer(load_chat_format(config.model.path), answer),
            facts=load_facts(config.model.path),
        )
        engine.faults += faults
        yield [engine]

    return open_engines
