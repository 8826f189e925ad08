"""The routing rows of one trajectory in the making: what is held, what to request next, and the final trace.

```
 next call ──next_start()───► position of the first row to request
 its answer ──add_answer()──► held: undecoded payloads, each with the hash of the tokens that it covers
 the end ────build_trace()──► RoutingTrace, merged and verified
```

An answer carries the rows of the whole sequence, or only those from a start on (a delta). A delta saves
bytes, but it is valid only if the rows before it still count: under `splice` always, under `replace` only
while the same engine serves the same weights. If an engine has recomputed the rows before a delta
(`retract`), the delta is useless and the next fetch starts from 0. Rows of tokens that the trajectory no
longer has are dropped.

An engine that lacks memory retracts calls: it drops their KV cache and their rows, and prefills them again.
Such rows are marked as recomputed, and the retractions counted. Those of a weight update are neither: it
recomputes all rows under the new weights, as an abort does.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import logging
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from async_rl import routing
from async_rl.engine_protocol import Finish, Retraction, RoutingPayload
from async_rl.engines.lease import Lease
from async_rl.errors import AlignmentError, EngineError
from async_rl.rollout.session.context import SessionContext
from async_rl.types import NEVER_COMPUTED, ExpertIdArray, Int32Array, RoutingTrace, VersionSpan

log = logging.getLogger(__name__)


class _HeldRows(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The rows `[payload.start, end)` of one answer."""

    lease: Lease
    """The lease of its call, whose engine decodes it."""
    payload: RoutingPayload
    prefix_hash: int
    """Hash of the tokens `[0, end)`."""
    prompt: int
    """Number of tokens that the call received; it sampled those after them."""
    spans: tuple[VersionSpan, ...]
    """Weight versions of the rows, counted from the first of them."""
    recomputed: tuple[int, int]
    """The rows that were computed anew, by another forward pass than the one that sampled or under other
    weights: a half-open range of positions."""

    @property
    def end(self) -> int:
        return self.payload.start + self.payload.num_rows

    @property
    def weight_version(self) -> int:
        return self.payload.weight_version


class RoutingRows:
    """Collects the routing rows of one trajectory.

    All methods but `build_trace` are synchronous, so that they also run during a cancellation.
    """

    def __init__(self, trajectory_id: str, context: SessionContext) -> None:
        """Start without rows; the hash of the trajectory's id decides whether flips are measured."""
        config = context.config
        self._trajectory_id = trajectory_id
        self._splices = config.routing.merge == "splice"
        self._interrupt = config.weights.interrupt
        """Decides whether engines recompute rows after a weight update."""
        self._facts = context.facts
        self._metrics = context.metrics
        self._measures_flips = unit_hash(trajectory_id) < config.routing.flip_sample
        self._held: list[_HeldRows] = []
        self._replaced: list[_HeldRows] = []

    def branch(self) -> RoutingRows:
        """Return a copy for a trajectory that begins with the same tokens."""
        other = copy.copy(self)
        other._held, other._replaced = list(self._held), []
        return other

    def discard(self) -> None:
        """Free all rows."""
        self._held.clear()
        self._replaced.clear()

    @property
    def needs_aborted(self) -> bool:
        """Whether rows of aborted calls are used.

        Under `replace` the resumed call computes them anew, so they only serve to measure flips.
        """
        return self._splices or self._measures_flips

    def num_held(self, token_ids: Int32Array) -> int:
        """Return how many rows of these tokens are held; drop all rows if the tokens were edited since."""
        if not self._held:
            return 0
        last = self._held[-1]
        if routing.hash_tokens(token_ids[: last.end]) != last.prefix_hash:
            log.warning(
                "trajectory %s was edited: its %d routing rows are fetched again",
                self._trajectory_id,
                last.end,
            )
            self._metrics.replay_rejected_total.labels("wrong_prefix").inc()
            self.discard()
            return 0
        return last.end

    def next_start(self, token_ids: Int32Array, engine_id: str, weight_version: int) -> int:
        """Return the position of the first row to request from an engine that continues these tokens."""
        held = self.num_held(token_ids)
        if not held:
            return 0
        last = self._held[-1]
        if self._splices:
            return 0 if self._measures_flips and weight_version != last.weight_version else held
        same = (last.lease.engine.engine_id, last.weight_version) == (engine_id, weight_version)
        return held if same else 0

    def add_answer(
        self,
        lease: Lease,
        finish: Finish,
        token_ids: Int32Array,
        prompt: int,
        *,
        recovered_version: int | None = None,
    ) -> None:
        """Keep the rows of an answer, if it has usable ones, and count the retractions of its call.

        Args:
            lease: The lease of the call.
            finish: The end of the call.
            token_ids: The tokens that the call received and sampled, `[prompt + n] int32`.
            prompt: How many tokens it received.
            recovered_version: The weight version that sampled the last tokens, for a call that was made for
                their rows alone. They are exact as far as the engine still had them cached, under the same
                weights.
        """
        # SGLang counts those of `interrupt: retract` too: they are where the version of the tokens changes.
        updates = [span.start for span in finish.version_spans[1:]] if self._interrupt == "retract" else []
        retractions = _for_memory(finish.retractions, updates)
        if retractions:
            count = sum(each.count for each in retractions)
            self._metrics.engine_retractions_total.labels(lease.engine.engine_id).inc(count)
        payload = finish.routing
        if payload is None:
            return
        recovery = recovered_version is not None
        kind = "recovery" if recovery else "delta" if payload.start else "full"
        self._metrics.routing_payloads_total.labels(kind).inc()
        if mixture := self._mixture(finish.version_spans, payload):
            self._report_mixture(lease, mixture)
            return  # no single version computed these rows; they are fetched again
        end = payload.start + payload.num_rows
        # Rows before that of the last token sampled by then. An update replaces all rows in any case.
        sampled = [each.at_most for each in retractions if each.at_most > max(updates, default=0)]
        recomputed = 0, prompt + max(sampled) - 1 if sampled else 0
        if recovery:
            recomputed = finish.cached_tokens if payload.weight_version == recovered_version else 0, end
        new = _HeldRows(
            lease=lease,
            payload=payload,
            prefix_hash=routing.hash_tokens(token_ids[:end]),
            prompt=prompt,
            spans=self._row_spans(finish.version_spans, payload, prompt, recomputed[1]),
            recomputed=recomputed,
        )
        before = self._held[-1].end if self._held else 0
        if payload.start > before:
            return  # it starts after the requested row, which would leave a gap
        if self._splices:
            self._held.append(new)
        elif payload.start == 0:
            if self._measures_flips:
                stale = [old for old in self._held if old.weight_version != new.weight_version]
                self._replaced = stale or self._replaced  # the last ones: memory for one copy is planned
            self._held = [new]
        elif payload.weight_version == self._held[-1].weight_version:
            self._held.append(new)
        # Otherwise the engine loaded new weights during the call and recomputed the rows before the delta.
        # The held rows are of another version, so the next fetch starts from 0.

    async def build_trace(self, token_ids: Int32Array) -> RoutingTrace:
        """Decode and merge the held rows, and check them against the tokens, in threads.

        Args:
            token_ids: The finished trajectory, `[T] int32`.

        Raises:
            AlignmentError: The rows do not fit the tokens; the rejection is counted.
        """
        try:
            traces = [await self._decode(held) for held in self._held]
            trace = await asyncio.to_thread(self._merge, traces, token_ids)
        except AlignmentError as error:
            self._metrics.replay_rejected_total.labels(error.reason).inc()
            raise
        for old in self._replaced:
            await self._measure_flips(old, trace)
        return trace

    # -- decoding and merging --------------------------------------------------------------------------

    async def _decode(self, held: _HeldRows) -> RoutingTrace:
        try:
            trace = await asyncio.to_thread(held.lease.engine.decode_routing, held.payload)
            if (found := len(trace.rows)) != (expected := held.payload.num_rows):
                raise AlignmentError(
                    f"{held.lease.engine.engine_id} sent {found} routing rows, expected {expected}",
                    "too_many_rows" if found > expected else "wrong_shape",
                )
        except AlignmentError as error:
            held.lease.record_strike(EngineError(str(error)))
            raise
        spans = trace.spans
        if len(spans) > 1:  # the engine reports the version of each row
            versions = sorted({span.weight_version for span in spans})
            if self._interrupt != "in_place" and len(versions) > 1:
                self._report_mixture(held.lease, f"rows of the versions {versions} in one response")
        elif len(held.spans) > 1:
            spans = held.spans
        return msgspec.structs.replace(trace, prefix_hash=held.prefix_hash, spans=spans)

    def _merge(self, traces: Sequence[RoutingTrace], token_ids: Int32Array) -> RoutingTrace:
        facts = self._facts
        merged: RoutingTrace | None = None
        last: _HeldRows | None = None
        for held, trace in zip(self._held, traces, strict=True):
            old, merged = merged, routing.splice(merged, trace, start=held.payload.start)
            if old is not None and last is not None and held.payload.start == 0:
                self._observe_flips(last, old.rows[last.prompt : last.end], trace)
            last = held
        if merged is None:
            shape = (0, len(facts.moe_layers), facts.top_k)
            none = np.empty(shape, routing.id_dtype(facts.num_experts))
            merged = routing.make_trace(
                none,
                facts.num_experts,
                NEVER_COMPUTED,
                moe_layers=facts.moe_layers,
                token_ids=token_ids[:0],
            )
        merged = routing.fit(merged, token_ids)
        return msgspec.structs.replace(merged, recomputed=tuple(self._recomputed()))

    def _recomputed(self) -> Iterator[tuple[int, int]]:
        """Yield the ranges of rows in the merged trace that were not computed as the tokens were sampled."""
        kept = 0
        for held in self._held:
            begin = max(kept, held.payload.start, held.recomputed[0])
            if begin < (end := min(held.recomputed[1], held.end)):
                yield begin, end
            kept = held.end

    # -- weight versions -------------------------------------------------------------------------------

    def _mixture(self, sampled: Sequence[VersionSpan], payload: RoutingPayload) -> str | None:
        """Describe the mixture of versions in one answer, or return None if there is none.

        An update that flushes the prefix cache leaves nothing of the old weights in an engine: after `abort`
        a call runs under one version, after `retract` the engine recomputes all earlier rows. Only `in_place`
        keeps old rows beside new ones, on purpose.
        """
        if self._interrupt == "in_place":
            return None
        versions = [span.weight_version for span in sampled]
        if self._interrupt == "retract":
            versions = versions[-1:]
        if {*versions, payload.weight_version} == {payload.weight_version}:
            return None
        return (
            f"tokens of the versions {versions} and rows of version {payload.weight_version} in one response"
        )

    def _row_spans(
        self, sampled: Sequence[VersionSpan], payload: RoutingPayload, prompt: int, recomputed: int
    ) -> tuple[VersionSpan, ...]:
        """Return the version of each row: of the token that it sampled, unless rows are recomputed."""
        count, version = payload.num_rows, payload.weight_version
        if self._interrupt != "in_place" or not sampled:
            return _one_span(count, version)
        # Row prompt - 1 sampled the first token; the rows before it were prefilled under the same weights. So
        # were recomputed rows and the one after them.
        offset = prompt - 1 - payload.start
        spans, begin = [], 0
        for span in sampled:
            end = min(offset + span.end, count)
            if end > max(begin, recomputed - payload.start):
                spans.append(VersionSpan(start=begin, end=end, weight_version=span.weight_version))
                begin = end
        return tuple(spans) if begin == count else _one_span(count, version)

    def _report_mixture(self, lease: Lease, what: str) -> None:
        self._metrics.routing_mixed_versions_total.inc()
        problem = f"{lease.engine.engine_id}: {what}, though updates flush its cache (weights.interrupt)"
        log.warning("trajectory %s: %s", self._trajectory_id, problem)
        lease.record_strike(EngineError(problem))

    # -- flips -----------------------------------------------------------------------------------------

    async def _measure_flips(self, old: _HeldRows, trace: RoutingTrace) -> None:
        """Compare replaced rows with their replacement; as a mere measurement, it never fails."""
        try:
            replaced = await self._decode(old)
        except AlignmentError as error:
            log.warning("trajectory %s: replaced rows cannot be read: %s", self._trajectory_id, error)
            return
        self._observe_flips(old, replaced.rows[old.prompt - old.payload.start :], trace)

    def _observe_flips(self, old: _HeldRows, before: ExpertIdArray, trace: RoutingTrace) -> None:
        """Compare the rows that one answer sampled with the rows of a later answer for the same tokens.

        Replaced rows are never trained on, so rows that do not fit are skipped.
        """
        after = trace.rows[old.prompt : old.end]
        if before.size and before.shape == after.shape:
            self._metrics.routing_flip_ratio.observe(routing.flip_ratio(before, after))


def _for_memory(retractions: Sequence[Retraction], updates: Sequence[int]) -> list[Retraction]:
    """Return the retractions of a call for lack of memory, without those of weight updates.

    A retraction before the first token is left out: no token was sampled with what it dropped.

    Args:
        retractions: All of the call.
        updates: For each update that retracted it, the tokens that it had sampled by then.
    """
    found = []
    for each in retractions:
        explained = sum(each.at_least <= update <= each.at_most for update in updates)
        if explained and each.at_least == each.at_most:
            continue  # updates in a row may also retract a call that has sampled nothing in between
        if each.at_most and each.count > explained:
            found.append(msgspec.structs.replace(each, count=each.count - explained))
    return found


def _one_span(count: int, version: int) -> tuple[VersionSpan, ...]:
    return (VersionSpan(start=0, end=count, weight_version=version),) if count else ()


def unit_hash(name: str) -> float:
    """Map a name to a number in [0, 1), the same in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") / 2**64
