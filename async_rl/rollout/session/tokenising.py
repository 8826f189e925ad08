"""Tokenises messages without blocking the event loop: long ones in a thread.

A tokenizer takes 1 to 3 s for a megabyte, the longest for runs of one character, and releases the
interpreter's lock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import msgspec

from async_rl.runtime.printable import without_surrogates
from async_rl.runtime.threads import LastingThread
from async_rl.runtime.waits import waiting
from async_rl.types import Int32Array

MAX_BLOCKING_BYTES: Final = 1 << 14
"""Messages up to this size are tokenised in the event loop, for 16 to 32 ms."""
_MAX_BYTES_PER_TOKEN: Final = 32
"""Text has 2 to 6 bytes per token on average."""
_MIN_BYTES: Final = 1 << 16
"""Of any length: the exact check follows."""


def size_of(messages: Any) -> int:
    """Return the size of messages as JSON, bytes."""
    try:
        return len(msgspec.json.encode(messages, enc_hook=str))
    except UnicodeEncodeError:  # half of a surrogate pair, which the chat format replaces
        return len(without_surrogates(str(messages)))


def can_fit(num_bytes: int, num_tokens: int) -> bool:
    """Return whether messages of `num_bytes` may have this few tokens, without tokenising them."""
    return num_bytes <= _MIN_BYTES + _MAX_BYTES_PER_TOKEN * num_tokens


async def tokenise(encode: Callable[[], Int32Array], num_bytes: int) -> Int32Array:
    """Return the tokens of messages of a size: of long ones from a thread, one after the other."""
    if num_bytes <= MAX_BLOCKING_BYTES:
        return encode()
    with waiting("tokeniser", f"{num_bytes / 1e6:.1f} MB"):
        return await asyncio.get_running_loop().run_in_executor(_thread(), encode)


@cache
def _thread() -> LastingThread:
    return LastingThread("tokenising of long messages")
