"""A scripted policy, which writes tokens of a real chat template, on a simulated engine."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import jinja2

from async_rl.config import SimulatedEngines
from async_rl.data.chat_format import ChatFormat
from async_rl.engine_protocol import EngineFacts, InterruptMode
from async_rl.engines.simulated import SimulatedEngine
from async_rl.store.journal import JournalEntry
from tests.support.sessions import Bench
from tests.support.writer import Writer

TEMPLATE = Path(__file__).parents[2] / "examples" / "calculator" / "chat_template.jinja"
FACTS = EngineFacts(
    num_layers=2, moe_layers=(0, 1), num_experts=8, top_k=2, vocab_size=300, context_length=1 << 16
)
_SPECIAL = {"<|im_start|>": 256, "<|im_end|>": 257}
_SPECIALS = re.compile("|".join(map(re.escape, _SPECIAL)))

Script = Callable[[str], str]
"""Returns the policy's text for the text of a prompt."""


class ByteTokenizer:
    """One token for each byte, and two special ones; ChatML with tools in Qwen's format."""

    chat_template = TEMPLATE.read_text()
    eos_token_id = _SPECIAL["<|im_end|>"]
    added_tokens_decoder: ClassVar[dict[int, Any]] = {}

    def __init__(self) -> None:
        environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
        # As transformers has it: Jinja's own escapes HTML, also in text that a template adds to it.
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        self._template = environment.from_string(self.chat_template)

    def __len__(self) -> int:
        return 256 + len(_SPECIAL)

    def apply_chat_template(
        self, conversation: list[dict[str, Any]], *, tools: Any, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        return self._template.render(
            messages=conversation, tools=tools, add_generation_prompt=add_generation_prompt
        )

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        ids, position = [], 0
        for match in _SPECIALS.finditer(text):
            ids += [*text[position : match.start()].encode(), _SPECIAL[match.group()]]
            position = match.end()
        return [*ids, *text[position:].encode()]

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool = False,
    ) -> str:
        names = {number: "" if skip_special_tokens else name for name, number in _SPECIAL.items()}
        pieces = [names[i].encode() if i in names else bytes([i % 256]) for i in token_ids]
        return b"".join(pieces).decode(errors="replace")


class Talker(Writer):
    """A policy that, at each generation prompt, writes what the script returns for the text so far."""

    def __init__(self, script: Script) -> None:
        super().__init__(ChatFormat(ByteTokenizer()), self._answer_to)
        self.script = script
        self.prompts: list[str] = []
        """Prompts as text, one for each turn that was begun."""
        self._heard: dict[int, asyncio.Event] = {}

    def _answer_to(self, prompt: str) -> str:
        self.prompts.append(prompt)
        return self.script(prompt)

    def __call__(self, prefix: Sequence[int], rng: random.Random) -> int | None:
        token = super().__call__(prefix, rng)
        for number, event in self._heard.items():
            if self.written >= number:
                event.set()
        return token

    async def has_said(self, num_tokens: int) -> None:
        """Wait until some turn has this many tokens."""
        await self._heard.setdefault(num_tokens, asyncio.Event()).wait()


def talking(
    script: Script,
    *,
    max_branches: int = 0,
    max_context_tokens: int = 8192,
    interrupt: InterruptMode = "abort",
    entry: JournalEntry | None = None,
    top_k: int = -1,
    **engine: Any,
) -> tuple[Bench, Talker]:
    """A bench whose policy follows a script, with a context for long conversations."""
    talker = Talker(script)
    config = SimulatedEngines(**{"decode_step_s": 0.0, **engine})
    simulated = SimulatedEngine("engine-0", config, seed=1, policy=talker, facts=FACTS)
    bench = Bench(
        simulated,
        facts=FACTS,
        chat=ChatFormat(ByteTokenizer()),
        max_context_tokens=max_context_tokens,
        max_new_tokens=1024,
        max_branches=max_branches,
        interrupt=interrupt,
        entry=entry,
        top_k=top_k,
    )
    return bench, talker


def lines(*answers: str) -> Script:
    """Return a script that writes these texts in order."""
    left = list(answers)
    return lambda prompt: left.pop(0)
