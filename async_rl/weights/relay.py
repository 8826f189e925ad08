"""Passes the buckets of one update from the trainer to several engines, each at its own pace.

```
 trainer   fill 0 ─ fill 1 ─ … waits until every engine has read 0 … ─ fill 2
 engine A    └ load 0 ─ load 1 ──────────┐                               └ load 2
 engine B    └ load 0 ──────────── load 1┘ (removed engines are not waited for)
```
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from typing import Final, Generic, TypeVar

from async_rl.errors import WeightsNotReceived, WeightSyncError

T = TypeVar("T")

_SILENT_S: Final = 8.0
"""How long the trainer waits for a reader before it looks whether that lives."""

BUFFERS: Final = 2
"""Buckets that exist at a time: one is filled while another is read."""


class BucketRelay(Generic[T]):
    """The buckets of one update.

    Invariant: a bucket is fetched only when every remaining reader is done with the one `BUFFERS` before it,
    whose memory it overwrites.
    """

    def __init__(
        self,
        readers: Iterable[str],
        num_buckets: int,
        fetch: Callable[[int], Awaitable[T]],
        find_dead: Callable[[Sequence[str]], Awaitable[Sequence[str]]],
    ) -> None:
        """Start with no bucket.

        Args:
            readers: Engines that read all buckets, or are removed.
            num_buckets: Number of buckets.
            fetch: Fills a bucket; called in order, one call at a time.
            find_dead: Returns which of some readers do not answer; bounded in time.
        """
        self._done = dict.fromkeys(readers, 0)
        self._num_buckets = num_buckets
        self._fetch = fetch
        self._find_dead = find_dead
        self.dead: list[str] = []
        """Readers that were removed because they did not answer."""
        self._buckets: list[T] = []
        self._error: Exception | None = None
        self._changed = asyncio.Event()

    @property
    def readers(self) -> list[str]:
        """Engines that have not been removed."""
        return list(self._done)

    async def fetch_buckets(self) -> None:
        """Fetch buckets as buffers become free, until all are fetched or no reader is left.

        Raises:
            Exception: What `fetch` raised; the readers get a `WeightsNotReceived`.
        """
        try:
            while self._done and len(self._buckets) < self._num_buckets:
                if len(self._buckets) - min(self._done.values()) < BUFFERS:
                    self._buckets.append(await self._fetch(len(self._buckets)))
                    self._wake()
                else:
                    await self._wait_for_readers()
        except Exception as error:
            self._error = error
            self._wake()
            raise

    async def _wait_for_readers(self) -> None:
        """Wait until a reader is further, or removed. Slow readers are waited for, dead ones removed."""
        try:
            async with asyncio.timeout(_SILENT_S):
                await self._changed.wait()
        except TimeoutError:
            first = min(self._done.values())
            dead = await self._find_dead([reader for reader, done in self._done.items() if done == first])
            self.dead += dead
            for reader in dead:
                self.remove_reader(reader)

    async def buckets(self, reader: str) -> AsyncGenerator[T, None]:
        """Yield all buckets in order; each may be read until the next one is requested.

        Raises:
            WeightsNotReceived: When the trainer has failed.
            WeightSyncError: When the reader was removed.
        """
        for number in range(self._num_buckets):
            if reader not in self._done:
                raise WeightSyncError(f"{reader} was given up after {number} of {self._num_buckets} buckets")
            self._done[reader] = number
            self._wake()
            while number >= len(self._buckets):
                if self._error is not None:
                    message = f"the trainer sent {number} of {self._num_buckets} buckets"
                    raise WeightsNotReceived(message) from self._error
                await self._changed.wait()
            yield self._buckets[number]

    def remove_reader(self, reader: str) -> None:
        """Stop waiting for a reader, whether it has read all buckets or failed."""
        self._done.pop(reader, None)
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
