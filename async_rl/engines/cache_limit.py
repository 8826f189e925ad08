"""How many calls the KV cache of an engine holds: as many as it is given at once.

```
              tokens of the cache
 limit  =  ─────────────────────────  ·  correction     at most the engine's own limit, at least 1
            tokens that a call holds

 a call ends ──► its tokens count in those of a call, averaged over the time that it ran
 a round of calls has ended ──► more than 5% of their tokens were prefilled again:   correction · 0.9
                            └─► less than 2.5%, and the limit was reached:           correction · 1.1
```

A round is as many calls as the limit. Where its cache is full, an engine retracts the calls that have
sampled least, and prefills them again later. Few of these cost less than the calls that a lower limit would
keep away. Whatever the limit says, no call begins whose prompt the cache cannot hold beside what the calls
have now: prompts are suddenly longer, or all calls resume with long prefixes. Pure: no I/O, no clock.
"""

from __future__ import annotations

import math
from typing import Final, Literal, get_args

_MEMORY_CALLS: Final = 512
"""Calls after which a call counts a third in the average: lengths change over many steps of a trainer."""

_EXPECTED_SHARE: Final = 0.25
"""Of a call's budget, before any call has ended: what `async-rl plan` expects of answers, too."""

_EXPECTED_CALLS: Final = 8
"""The calls that this expectation counts as: the first that end are the shortest ones."""

_MAX_REPEATED: Final = 0.05
"""Share of tokens that may be prefilled again: an engine prefills ten times as fast as it decodes, at least,
so this costs half a percent of its time. A call that is kept away costs up to 1 / limit of its throughput."""

_CUT: Final = 0.9
_RISE: Final = 1.1

_LEAST: Final = 0.1
_MOST: Final = 4.0
"""Bounds of the correction: the limit is not far from the estimate for long."""


LimitReason = Literal["setting", "cache", "retractions", "refusals"]
"""What the limit of an engine's calls follows: a setting, the size of its cache, retractions for lack of it,
or calls that it has refused (`back_pressure`)."""


LIMIT_REASONS: Final[tuple[LimitReason, ...]] = get_args(LimitReason)


class CallSizes:
    """The tokens that a call holds in a cache, averaged over the time that calls run.

    A call of P tokens of prompt and L sampled ones holds P + L/2 on average, for L steps: long answers count
    for as long as they run. A call that is interrupted and resumed counts the same in two parts.

    Example:
        >>> sizes = CallSizes()
        >>> sizes.record_call(100, 200)
        >>> sizes.mean_tokens
        200.0
    """

    def __init__(self) -> None:
        """Start without calls."""
        self._token_steps = 0.0
        self._steps = 0.0

    @property
    def mean_tokens(self) -> float:
        """Tokens of a call; 0 before anything is known of calls."""
        return self._token_steps / self._steps if self._steps else 0.0

    def expect_call(self, prompt: int, budget: int) -> None:
        """Expect calls like this one, unless calls are known already.

        Args:
            prompt: Tokens of its prompt.
            budget: Tokens that it may sample.
        """
        if not self._steps and budget:
            sampled = _EXPECTED_SHARE * budget
            self._steps = _EXPECTED_CALLS * sampled
            self._token_steps = self._steps * (prompt + sampled / 2)

    def record_call(self, prompt: int, sampled: int) -> None:
        """Record a call, or a part of one, that has ended."""
        if sampled:
            keep = 1.0 - 1.0 / _MEMORY_CALLS
            self._steps = keep * self._steps + sampled
            self._token_steps = keep * self._token_steps + sampled * (prompt + sampled / 2)


class CacheLimit:
    """The limit of one engine's calls, or of the share of it that a process has.

    Example:
        >>> sizes = CallSizes()
        >>> sizes.record_call(100, 200)
        >>> limit = CacheLimit(sizes, cache_tokens=6400, max_calls=64)
        >>> limit.max_calls
        32.0
        >>> limit.reason
        'cache'
    """

    def __init__(
        self, sizes: CallSizes, *, cache_tokens: float = math.inf, max_calls: float = math.inf
    ) -> None:
        """Start with the estimate.

        Args:
            sizes: Those of the calls of all engines.
            cache_tokens: Tokens that the cache holds.
            max_calls: The limit that no estimate exceeds.
        """
        self._sizes = sizes
        self.cache_tokens = cache_tokens
        """Tokens that the cache holds."""
        self.ceiling = max_calls
        """The limit that no estimate exceeds."""
        self.held_tokens = 0
        """Tokens that the calls hold now."""
        self.correction = 1.0
        """What observation has made of the estimate, as a factor."""
        self._ended = 0
        """Calls that have ended since the correction changed."""
        self._ended_tokens = 0
        """Tokens that they held in the end."""
        self._repeated_tokens = 0
        """Tokens that the engine has prefilled again since, for lack of memory."""
        self._was_reached = False
        """Whether the engine had as many calls as the limit since."""

    @property
    def _fitting_calls(self) -> float:
        """The calls that the cache holds, by the estimate and its correction."""
        mean = self._sizes.mean_tokens
        return self.correction * self.cache_tokens / mean if mean else math.inf

    @property
    def max_calls(self) -> float:
        """The most calls that the engine is given at once."""
        return max(1.0, min(self.ceiling, self._fitting_calls))

    @property
    def reason(self) -> LimitReason:
        """What the limit follows: the engine's own, the size of its cache, or retractions."""
        if self._fitting_calls >= self.ceiling:
            return "setting"
        return "retractions" if self.correction < 1.0 else "cache"

    def share_capacity(self, cache_tokens: int | None, max_calls: int | None, num_sharers: int) -> None:
        """Take over what the engine holds, of which each process that calls it has an equal share.

        All of them together keep within it, but that each may always have one call.
        """
        self.cache_tokens = math.inf if cache_tokens is None else cache_tokens / num_sharers
        self.ceiling = math.inf if max_calls is None else max_calls // num_sharers

    def is_full(self, num_calls: int, prompt: int = 0) -> bool:
        """Return whether the engine takes no further call, which adds a prompt to what it holds."""
        if num_calls == 0:
            return False  # one call alone fits, or is refused by the engine
        return self.held_tokens + prompt > self.cache_tokens or num_calls >= self.max_calls

    def record_retraction(self, tokens: int) -> None:
        """Record that the engine has taken the memory of a call, and prefilled its tokens again."""
        self._repeated_tokens += tokens

    def expect_call(self, prompt: int, budget: int) -> None:
        """Expect calls like this one, unless calls are known already: see `CallSizes.expect_call`."""
        self._sizes.expect_call(prompt, budget)

    def record_end(self, prompt: int, sampled: int, num_calls: int) -> None:
        """Record a call that ends; the last one of a round corrects the estimate.

        Args:
            prompt: Tokens of its prompt that are held for it alone.
            sampled: Tokens that it has sampled.
            num_calls: The engine's calls, with this one.
        """
        self.held_tokens -= prompt + sampled
        self._sizes.record_call(prompt, sampled)
        self._ended += 1
        self._ended_tokens += prompt + sampled
        limit = self.max_calls
        self._was_reached |= num_calls >= limit
        if self._ended < limit:
            return
        repeated = self._repeated_tokens / max(1, self._ended_tokens)
        if repeated > _MAX_REPEATED:
            self.correction = max(_LEAST, self.correction * _CUT)
        elif repeated < _MAX_REPEATED / 2 and self._was_reached and limit < self.ceiling:
            self.correction = min(_MOST, self.correction * _RISE)
        self._ended = self._ended_tokens = self._repeated_tokens = 0
        self._was_reached = False
