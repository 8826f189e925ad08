"""Answers of further models in text: for judges, and for rewards, agent loops and tools that ask for them.

```
 messages ──► chat template of the model ──► calls of its engines until the turn is complete ──► text
                                               ▲ an engine failed: the next lease continues with its tokens
```
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from async_rl.data.chat_format import ChatFormat, load_chat_format
from async_rl.engine_protocol import GenerateRequest, SamplingParams
from async_rl.engines.model_facts import load_facts
from async_rl.errors import ConfigError, RolloutError
from async_rl.rollout.model_calls import call_model
from async_rl.rollout.session.context import SessionContext
from async_rl.rollout.session.tokenising import can_fit, size_of, tokenise
from async_rl.runtime.waits import waiting


class ModelAnswers:
    """Asks the models of `models`."""

    def __init__(self, context: SessionContext) -> None:
        """Read the chat template of a model when it is asked for the first time.

        A model in the same folder as the policy has the policy's.
        """
        config = context.config
        self._context = context
        self._chats: dict[str, ChatFormat] = {
            name: context.chat for name, model in config.models.items() if model.path == config.model.path
        }
        self._limits = {name: model.context_length for name, model in config.models.items()}
        """The context length of each model, where the config says it or, once it is asked, the folder."""
        self._loading = asyncio.Lock()

    async def ask(
        self,
        model: str,
        messages: Sequence[Mapping[str, Any]],
        *,
        max_new_tokens: int = 512,
        temperature: float = 0.0,
    ) -> str:
        """Return a model's answer to a conversation, without special tokens.

        Raises:
            ConfigError: `models` does not have it.
            RolloutError: It refuses the conversation, which is too long, for example.
        """
        if model not in self._context.models:
            known = ", ".join(self._context.models) or "none"
            raise ConfigError(f"the model {model!r} is asked, but models has {known}: add it there")
        chat = await self._chat_of(model)
        num_bytes, limit = size_of(messages), self._limits[model]
        if limit is not None and not can_fit(num_bytes, limit):
            raise RolloutError(
                f"the model {model!r} is asked about {num_bytes} bytes, which cannot fit into its context of "
                f"{limit} tokens: shorten them, or raise models.{model}.context_length"
            )
        began_s = self._context.clock()
        sampling = SamplingParams(temperature=temperature, stop_token_ids=chat.stop_token_ids)
        with waiting("model", model):
            prompt = await tokenise(partial(chat.prompt_ids, messages), num_bytes)
            token_ids = await self._sample(model, prompt, max_new_tokens, sampling)
        self._context.metrics.model_call_seconds.labels(model).observe(self._context.clock() - began_s)
        return chat.decode(token_ids)

    async def _chat_of(self, model: str) -> ChatFormat:
        async with self._loading:
            path = self._context.config.models[model].path
            if model not in self._chats:
                self._chats[model] = await asyncio.to_thread(load_chat_format, path)
            if self._limits[model] is None:
                with suppress(ConfigError):  # a server that is already running may have any model
                    self._limits[model] = (await asyncio.to_thread(load_facts, path)).context_length
        return self._chats[model]

    async def _sample(
        self, model: str, prompt: np.ndarray, max_new_tokens: int, sampling: SamplingParams
    ) -> list[int]:
        """Ask engines until the turn is complete; one that fails leaves its tokens to the next."""
        sampled = list[int]()
        while True:
            request = GenerateRequest(
                request_id="",
                input_ids=np.concatenate([prompt, np.array(sampled, np.int32)]),
                max_new_tokens=max_new_tokens - len(sampled),
                sampling=sampling,
            )
            more, finish = await call_model(self._context, model, request)
            sampled += more
            stopped = bool(sampled) and sampled[-1] in sampling.stop_token_ids
            if stopped or len(sampled) == max_new_tokens or (finish is not None and finish.reason != "abort"):
                return sampled
