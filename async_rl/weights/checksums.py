"""Verifies that engines have the weights they should, by version number and by sums over parameters.

An engine sums the parameters it computes with, after fusing and sharding them. The expected sums come from

1. the trainer, for parameters over which it can compute the same sum (see `trainer.weights.checksums`);
2. an engine that has loaded the version from files, with the same ranks and parameters;
3. failing that, the first engine that has taken the version: an engine that differs from it is taken out of
   service, loads from files, and becomes the reference for the others.

Between versions, sums and the log-probs of a canary (a fixed call) must change when the trainer's weights do.
The canary also finds what no sum shows: an engine that computes with copies of its parameters.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, Final

import numpy as np

from async_rl.config import WeightsConfig
from async_rl.engine_protocol import Chunk, Engine, GenerateRequest, SamplingParams
from async_rl.engines.control_requests import wait_out
from async_rl.engines.pool import EnginePool
from async_rl.errors import AsyncRLError, TrainerError, VersionMismatch
from async_rl.observability.metrics import Metrics
from async_rl.trainer_protocol import Trainer

log = logging.getLogger(__name__)

Sums = tuple[dict[str, str], ...]
"""For each tensor-parallel rank: the sum over every parameter, by name."""

WATCH_EVERY: Final = 20
"""Versions between two comparisons of what engines serve: sums and a canary cost them a second."""

CANARY_SUFFIX: Final = "-canary"
"""How the ids of canaries end, in the logs of engines."""

_CANARY_TOKENS: Final = 16
"""Tokens of the canary's prompt and of its answer. A change of the weights hardly leaves that number of
log-probs equal to the bit, and they take a fraction of a second."""

_CANARY_S: Final = 10.0
"""How long a canary may hold up an update."""


class VersionVerifier:
    """Verifies the weight version that an engine serves, after it was updated."""

    def __init__(
        self,
        config: WeightsConfig,
        *,
        pool: EnginePool,
        trainer: Trainer,
        metrics: Metrics,
        adapters: bool = False,
        comparison: ChecksumComparison | None = None,
    ) -> None:
        """Expect no version yet.

        Args:
            config: Whether to compare only version numbers, or also checksums.
            pool: Quarantines engines that turn out to have wrong weights.
            trainer: Sums its own weights.
            metrics: Receives whether an engine's weights stay the same.
            adapters: Whether engines load adapters, which their checksums leave out: those of the model's
                weights never change, so only the canary is watched.
            comparison: Knows from an earlier trainer which sums can be compared.
        """
        self._verify = config.verify
        self._pool = pool
        self._trainer = trainer
        self._metrics = metrics
        self._comparison = comparison or ChecksumComparison()
        self._watches: dict[str, tuple[ChangeWatch, Callable[[Engine, int], Awaitable[Any]]]] = {}
        """By what is watched: the watch, and what reads it from an engine that serves a version."""
        if not adapters:
            self._watches["checksum of its parameters"] = ChangeWatch(), _read_sums
        # A paused engine looks at a call only when it resumes. Then others run, and batches change log-probs.
        if config.interrupt == "abort":
            self._watches["log-prob of a fixed text"] = ChangeWatch(), _ask_canary
        self._unwatched: set[tuple[str, str]] = set()
        """Engines, each with what was reported because it does not return it."""

    async def expect_version(self, version: int) -> None:
        """Let the trainer sum its weights, which do not change meanwhile."""
        if self._verify == "version" and not self._is_watched(version):
            return
        try:
            sums = await self._trainer.checksums()
        except TrainerError as error:
            if self._verify == "checksum":
                raise
            # Watching must not end what it watches. A trainer that is gone is found by the next call.
            log.warning("cannot watch whether weights change at version %d: %s", version, error)
            return
        self._comparison.expect_sums(version, sums)
        for watch, _ in self._watches.values():
            watch.expect_sums(version, sums)

    def _is_watched(self, version: int) -> bool:
        return version > 0 and version % WATCH_EVERY == 0

    async def verify_version(self, engine: Engine, version: int, *, from_files: bool) -> None:
        """Read the version back from an engine; quarantine other engines that prove to have wrong weights.

        Args:
            engine: The engine, after an update.
            version: The version it was updated to.
            from_files: Whether it has loaded files, rather than what was sent.

        Raises:
            VersionMismatch: When the engine has another version or other weights.
        """
        health = await wait_out(engine.health)
        if health.weight_version != version:
            raise VersionMismatch(
                f"engine {engine.engine_id} reports weight version {health.weight_version} after an "
                f"update to {version}"
            )
        if self._is_watched(version):
            await self._watch_changes(engine, version)
        if self._verify == "version":
            return
        sums = await engine.checksums()
        wrong = self._comparison.report_sums(engine.engine_id, version, sums, from_files=from_files)
        errors = {
            engine_id: VersionMismatch(f"engine {engine_id} does not have version {version}: {difference}")
            for engine_id, difference in wrong.items()
        }
        own_error = errors.pop(engine.engine_id, None)
        for engine_id, error in errors.items():
            self._pool.quarantine_engine(engine_id, error)
        if own_error is not None:
            raise own_error

    async def _watch_changes(self, engine: Engine, version: int) -> None:
        """Report an engine whose weights are those of an earlier version, although the trainer's changed."""
        engine_id, is_stuck = engine.engine_id, []
        for what, (watch, read) in self._watches.items():
            try:
                found = await read(engine, version)
            except (AsyncRLError, TimeoutError) as error:
                if (engine_id, what) not in self._unwatched:
                    self._unwatched.add((engine_id, what))
                    log.warning(
                        "cannot watch whether the weights of %s change: no %s: %s", engine_id, what, error
                    )
                continue
            since = watch.unchanged_since(engine_id, version, found)
            is_stuck.append(since is not None)
            if since is not None:
                log.error(
                    "engine %s reports version %d and serves the weights of version %d: no %s has changed, "
                    "and the trainer's weights have; restart it, and set weights.verify: checksum",
                    engine_id,
                    version,
                    since,
                    what,
                )
        if is_stuck:
            self._metrics.served_weights_unchanged.labels(engine_id).set(any(is_stuck))


async def _read_sums(engine: Engine, version: int) -> Any:
    """Return the engine's sums over its parameters."""
    return await engine.checksums()


async def _ask_canary(engine: Engine, version: int) -> Any:
    """Return what an idle engine answers to the canary: greedily sampled tokens, and their log-probs.

    Args:
        engine: The engine.
        version: The version that it serves.

    Raises:
        AsyncRLError: It did not answer.
        TimeoutError: Not in time.
    """
    request = GenerateRequest(
        request_id=f"{secrets.token_hex(16)}{CANARY_SUFFIX}",
        input_ids=np.arange(1, _CANARY_TOKENS + 1, dtype=np.int32),
        max_new_tokens=_CANARY_TOKENS,
        sampling=SamplingParams(temperature=0.0),
        weight_version=version,
    )
    answer: list[tuple[int, float]] = []
    stream: Any = engine.generate(request)
    async with asyncio.timeout(_CANARY_S), aclosing(stream):
        async for event in stream:
            if isinstance(event, Chunk):
                answer += zip(event.token_ids.tolist(), event.log_probs.tolist(), strict=True)
    return answer


class ChangeWatch:
    """Finds engines whose weights do not change although the trainer's do.

    Unlike `ChecksumComparison` it needs no parameter that trainer and engine sum alike, so it holds for any
    fusing, sharding and quantization, and for whatever else of an engine depends on its weights.

    Example:
        >>> watch = ChangeWatch()
        >>> for version, weight in ((20, "a"), (40, "b")):
        ...     watch.expect_sums(version, {"w": weight})
        ...     print(watch.unchanged_since("engine-0", version, ({"w": "stuck"},)))
        None
        20
    """

    def __init__(self) -> None:
        self._version = -1
        self._expected: Mapping[str, str] = {}
        self._last: dict[str, tuple[int, Mapping[str, str], Any]] = {}
        """For each engine: the oldest version with what was found last, and the trainer's sums then."""

    def expect_sums(self, version: int, sums: Mapping[str, str]) -> None:
        """Set the trainer's sums over a version."""
        self._version, self._expected = version, sums

    def unchanged_since(self, engine_id: str, version: int, found: Any) -> int | None:
        """Return the version whose weights an engine still has, if the trainer's have changed since.

        Args:
            engine_id: The engine.
            version: The version that it reports.
            found: Its sums, or what else depends on its weights alone.
        """
        if version != self._version:
            return None  # overtaken: it will load again
        last = self._last.get(engine_id)
        if last is None or last[2] != found:
            self._last[engine_id] = (version, self._expected, found)
            return None
        return last[0] if last[1] != self._expected else None


class ChecksumComparison:
    """Compares the sums that trainer and engines report, for one weight version at a time.

    Example:
        >>> comparison = ChecksumComparison()
        >>> comparison.report_sums("engine-0", 3, ({"w": "aa"},), from_files=False)
        {}
        >>> comparison.report_sums("engine-1", 3, ({"w": "bb"},), from_files=False)
        {'engine-1': 'w of rank 0 sums to bb, and to aa on engine-0'}
    """

    def __init__(self) -> None:
        self._version = -1
        self._expected: Mapping[str, str] = {}
        self._expected_version = -1
        self._comparable: frozenset[str] | None = None
        self._reports: dict[str, Sums] = {}
        self._reference: tuple[str, Sums] | None = None
        self._from_files = False

    def expect_sums(self, version: int, sums: Mapping[str, str]) -> None:
        """Set the trainer's sums over a version, by the engines' parameter names."""
        self._expected_version, self._expected = version, sums
        if version < self._version:  # the trainer has gone back to a checkpoint
            self._begin_version(version)

    def _begin_version(self, version: int) -> None:
        self._version, self._reports, self._reference, self._from_files = version, {}, None, False

    def report_sums(self, engine_id: str, version: int, sums: Sums, *, from_files: bool) -> dict[str, str]:
        """Compare the sums that an engine reports after it has taken a version.

        Args:
            engine_id: The engine.
            version: The version it serves.
            sums: The sums over its parameters.
            from_files: Whether it has loaded files, rather than what was sent.

        Returns:
            Engines with wrong weights, this one or others, and what is wrong with them.
        """
        if version < self._version:
            return {}  # overtaken: it will load again
        if version != self._version:
            self._begin_version(version)
        if from_files and self._comparable is None and self._expected_version == version:
            self._comparable = self._calibrate(sums)
        if difference := self._unlike_trainer(version, sums):
            return {engine_id: difference}
        self._reports[engine_id] = sums
        if self._reference is None or (from_files and not self._from_files):
            self._reference, self._from_files = (engine_id, sums), from_files
        compared = list(self._reports) if self._reference[0] == engine_id else [engine_id]
        wrong = {
            other: difference
            for other in compared
            if (difference := _difference(self._reports[other], self._reference))
        }
        for other in wrong:
            del self._reports[other]
        return wrong

    def _calibrate(self, sums: Sums) -> frozenset[str]:
        """Return the parameters whose sums agree between trainer and engine after a load from files."""
        names = [name for name in self._expected if len(sums) == 1 and name in sums[0]]
        equal = frozenset(name for name in names if sums[0][name] == self._expected[name])
        log.info(
            "checksums: %d of an engine's %d parameters can be compared with the trainer's, the rest only "
            "with other engines'",
            len(equal),
            len(sums[0]),
        )
        return equal

    def _unlike_trainer(self, version: int, sums: Sums) -> str:
        if version != self._expected_version or len(sums) != 1:
            return ""
        for name in sorted(self._comparable or ()):
            if sums[0].get(name) != self._expected.get(name):
                return f"{name} sums to {sums[0].get(name)}, and to {self._expected.get(name)} in the trainer"
        return ""


def _difference(sums: Sums, reference: tuple[str, Sums]) -> str:
    """Describe the first difference, or return an empty string.

    Engines whose parameters are laid out differently are not compared.
    """
    other, expected = reference
    if [set(rank) for rank in sums] != [set(rank) for rank in expected]:
        return ""
    for number, (rank, wanted) in enumerate(zip(sums, expected, strict=True)):
        for name, found in rank.items():
            if found != wanted[name]:
                return f"{name} of rank {number} sums to {found}, and to {wanted[name]} on {other}"
    return ""
