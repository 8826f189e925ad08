"""The tokens of one trajectory: who wrote them, and how the policy comes to write more.

```
 a turn ──► one or more engine calls ──► its tokens
             │ abort: keep tokens, wait for an engine, call again with the rest
             │ engine died: the same, elsewhere
             └ stop / length: the turn is over
```

Everything sampled is kept as a segment under its own weight version the moment its call ends, however it
ends. Nothing the model sampled is ever tokenised again: a call gets the token ids so far and appends what
comes back. The journal is told of all of it; after a restart the loop runs again and is given back what the
journal has (`rollout.replay`).

Routing is gathered by `rollout.rows`: each call asks for the rows that are not held yet, and hands in what
it reports. Rows that no call reported are recovered by a prefill without new tokens, or marked invalid.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Final, Literal, Self

import numpy as np

from async_rl.config import RolloutConfig, RoutingConfig
from async_rl.data.chat_format import ChatFormat
from async_rl.engine_protocol import (
    Chunk,
    EngineFacts,
    Finish,
    GenerateRequest,
    InterruptMode,
    SamplingParams,
    check_partition,
)
from async_rl.engines.pool import EnginePool, Lease
from async_rl.errors import EngineError
from async_rl.observability.metrics import Metrics
from async_rl.queue.journal import Entry
from async_rl.rollout.session.restore import RestoredTurns
from async_rl.rollout.session.routing_rows import RoutingRows
from async_rl.rollout.session.tokens import TokenLog
from async_rl.runtime.waits import waiting
from async_rl.types import (
    Context,
    FinishReason,
    Int32Array,
    RoutingTrace,
    Sampled,
    VersionSpan,
)

log = logging.getLogger(__name__)

_MAX_UNASKED_ABORTS: Final = 8
"""Calls in a row that may end without a token and without our doing, before the trajectory is given up."""

_MAX_RECOVERIES: Final = 4
"""Tries to fetch missing routing rows; each can be cut short by a weight update."""


class _RunningCall:
    """What one engine call has delivered so far."""

    def __init__(self, engine_id: str, since_version: int) -> None:
        self.engine_id = engine_id
        self.since_version = since_version
        self.token_ids: list[int] = []
        self.log_probs: list[float] = []
        self.versions: list[VersionSpan] = []
        self.finish: Finish | None = None

    def take(self, chunk: Chunk) -> None:
        """Keep what came. Only the engine's own account says which weights sampled it: until there is one it
        counts as old as the call, for a token may have been on its way while the weights changed.
        """
        self.token_ids += chunk.token_ids
        self.log_probs += chunk.log_probs
        self._count()

    def cut_unfit(self) -> None:
        """Forget everything from the first log-prob on that is not finite."""
        fit = next((i for i, value in enumerate(self.log_probs) if not math.isfinite(value)), None)
        if fit is not None:
            del self.token_ids[fit:], self.log_probs[fit:]
            self._count()

    def clear(self) -> None:
        """Forget an answer that cannot be right."""
        self.token_ids.clear()
        self.log_probs.clear()
        self.versions.clear()
        self.finish = None

    @property
    def spans(self) -> Sequence[VersionSpan]:
        """The engine's own account of versions, or the call's when it ended without one."""
        return self.finish.version_spans if self.finish is not None else self.versions

    def _count(self) -> None:
        num = len(self.token_ids)
        self.versions = [VersionSpan(start=0, end=num, weight_version=self.since_version)] if num else []


class Transcript(TokenLog):
    """The tokens of one trajectory as engines write them, for its session, which is built on it."""

    def __init__(
        self,
        trajectory_id: str,
        *,
        pool: EnginePool,
        chat: ChatFormat,
        facts: EngineFacts,
        rollout: RolloutConfig,
        routing_config: RoutingConfig,
        interrupt: InterruptMode,
        metrics: Metrics,
        new_id: Callable[[], str],
        clock: Callable[[], float],
        entry: Entry | None,
    ) -> None:
        self._entry = entry or Entry(trajectory_id)  # one that no journal reads costs nothing
        TokenLog.__init__(
            self,
            trajectory_id,
            chat=chat,
            rollout=rollout,
            metrics=metrics,
            clock=clock,
            segments=self._entry.segments,
        )
        self._pool = pool
        self._facts = facts
        self._routing = routing_config
        self._new_id = new_id
        self._replay = None if self._entry.replay is None else RestoredTurns(self._entry.replay)
        self._rows = RoutingRows(
            trajectory_id,
            config=routing_config,
            interrupt=interrupt,
            facts=facts,
            metrics=metrics,
            strike=pool.record_strike,
        )

    def _inherit(self, parent: Self) -> None:
        TokenLog._inherit(self, parent)
        self._rows = parent._rows.branch()
        self._pool.dispatcher.share_cached_prefix(parent.trajectory_id, self.trajectory_id)

    async def _write(self, budget: int, stop: Sequence[str]) -> Literal["stop", "length"]:
        """Let the policy write a turn of so many tokens at most; how it ended."""
        sampling = SamplingParams(
            temperature=self._config.temperature,
            top_p=self._config.top_p,
            top_k=self._config.top_k,
            stop_token_ids=tuple(self._chat.stop_token_ids),
            stop=tuple(stop),
        )
        begin, unasked = self._length, 0
        reason = self._replay_turn(budget, stop)
        last = self._length
        resumed = last > begin
        if self._growing is not None and resumed:
            self._growing.take(self._buffer[begin:last].tolist())
        while reason is None:
            if self._has_stopped(begin, sampling):
                reason = "stop"  # its call was cut short after its last token, before it said so
                break
            if (left := budget - (self._length - begin)) <= 0:
                reason = "length"
                break
            ended, ours = await self._call(left, sampling, resumed=resumed)
            if ended == "stop" or ended == "length":
                reason = ended
                break
            resumed = True
            unasked = 0 if ours or self._length > last else unasked + 1
            last = self._length
            if unasked > _MAX_UNASKED_ABORTS:
                raise EngineError(
                    f"engines ended {unasked} calls of trajectory {self.trajectory_id} in a row, though "
                    "nobody interrupted them: see the engines' logs"
                )
        self._entry.end_turn(self._length, reason)
        return reason

    async def _call(
        self, budget: int, sampling: SamplingParams, *, resumed: bool
    ) -> tuple[FinishReason, bool]:
        """Make one engine call and keep what came of it.

        Returns:
            Why it ended, and whether an abort was our own doing (a weight update).
        """
        async with self._pool.lease(self.trajectory_id, self._length + budget, prompt=self._length) as lease:
            call = self._entry.call = _RunningCall(lease.engine.engine_id, lease.weight_version)
            if resumed:
                self._num_resumes += 1
                self._metrics.resumes_total.inc()
            request = self._request(lease, self._length, budget, sampling)
            prompt, began_s = self._length, self._clock()
            reason: FinishReason = "failover"
            try:
                async with aclosing(lease.generate(request)) as stream:
                    async for event in stream:
                        if isinstance(event, Chunk):
                            call.take(event)
                            if self._growing is not None:
                                self._growing.take(event.token_ids)
                        else:
                            call.finish = event
                            reason = event.reason
            except EngineError:
                reason = "failover"
            else:
                if not self._is_right(call, lease):
                    reason = "failover"
            finally:
                # Also on cancellation: what was sampled is a segment before anybody can look.
                self._keep(call, lease, reason, prompt)
                self._entry.call = None
                self._engine_s += self._clock() - began_s
            ours = reason == "abort" and lease.interrupted
        if reason == "failover":
            self._num_failovers += 1
            self._metrics.failovers_total.inc()
        if reason == "abort" or len(call.spans) > 1:
            count = max(1, len(call.spans) - 1) if reason != "abort" else 1
            self._num_interruptions += count
            self._metrics.interruptions_total.inc(count)
            if reason != "abort":  # the engine itself went on (retract, in_place)
                self._num_resumes += count
                self._metrics.resumes_total.inc(count)
        return reason, ours

    def _is_right(self, call: _RunningCall, lease: Lease) -> bool:
        """Whether an answer may be kept; otherwise it is forgotten and held against its engine."""
        engine_id = lease.engine.engine_id
        if call.finish is None:
            problem = f"engine {engine_id} ended a stream without a finish"
        elif not check_partition(call.finish.version_spans, len(call.token_ids)):
            problem = (
                f"engine {engine_id} reports weight versions {call.finish.version_spans} for "
                f"{len(call.token_ids)} sampled tokens"
            )
        elif not all(math.isfinite(value) for value in call.log_probs):
            problem = f"engine {engine_id} returned log-probs that are not finite"
        else:
            return True
        call.clear()
        lease.record_strike(EngineError(problem))
        return False

    def _request(
        self, lease: Lease, num_tokens: int, max_new_tokens: int, sampling: SamplingParams
    ) -> GenerateRequest:
        """A call that is given the first `num_tokens`, and asked for the rows that are missing."""
        token_ids, wanted, start = self._buffer[:num_tokens], self._routing.from_engine, 0
        if wanted:
            start = self._rows.start(token_ids, lease.engine.engine_id, lease.weight_version)
        return GenerateRequest(
            request_id=self._new_id(),
            input_ids=token_ids,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            return_routing=wanted,
            routing_start=start,
        )

    def _keep(self, call: _RunningCall, lease: Lease, reason: FinishReason, prompt: int) -> None:
        """Turn a call's tokens into segments, one for each weight version, and remember its routing."""
        if call.finish is None:
            call.cut_unfit()  # it was cut short before anybody could judge it as a whole
        for span in call.spans:
            if span.end <= span.start:
                continue
            self._append(
                Sampled(
                    token_ids=np.array(call.token_ids[span.start : span.end], np.int32),
                    rollout_log_probs=np.array(call.log_probs[span.start : span.end], np.float32),
                    weight_version=span.weight_version,
                    engine_id=lease.engine.engine_id,
                    finish_reason=reason,
                )
            )
        self._metrics.sampled_tokens_total.inc(len(call.token_ids))
        if call.finish is not None:
            self._rows.take(lease.engine, call.finish, self._buffer[: self._length], prompt)

    def _read(self, token_ids: Int32Array) -> None:
        """Append what the policy did not write; a replay must go on with the same."""
        if self._replay is not None:
            self._replay.context(token_ids)
            self._end_replay()
        self._append(Context(token_ids=token_ids))

    def _replay_turn(self, budget: int, stop: Sequence[str]) -> Literal["stop", "length"] | None:
        """Append what the journal has of the turn that begins now; how it ended, or None to go on with it."""
        self._entry.begin_turn(self._length, budget, stop)
        if self._replay is None:
            return None
        sampled, ended = self._replay.turn(self._length, budget, stop)
        for segment in sampled:
            self._append(segment)
            self._num_interruptions += segment.finish_reason == "abort"
            self._num_failovers += segment.finish_reason == "failover"
        self._num_resumes += max(0, len(sampled) - 1)
        self._metrics.resumed_tokens_total.inc(sum(len(segment.token_ids) for segment in sampled))
        self._end_replay()
        return None if ended is None else ended.reason

    def _end_replay(self) -> None:
        """Go on live once nothing is left to replay."""
        if self._replay is not None and self._replay.done:
            if self._replay.num_discarded:
                log.warning(
                    "trajectory %s takes another course than before the restart: %d tokens are not used",
                    self.trajectory_id,
                    self._replay.num_discarded,
                )
                self._metrics.resume_discarded_tokens_total.inc(self._replay.num_discarded)
            self._replay = None
            self._entry.end_replay()

    def _has_stopped(self, begin: int, sampling: SamplingParams) -> bool:
        """Whether the turn that began there has met a stop token or string."""
        if self._length == begin:
            return False
        if int(self._buffer[self._length - 1]) in sampling.stop_token_ids:
            return True
        if not sampling.stop:
            return False
        text = self._chat.decode(self._buffer[begin : self._length])
        return any(stop in text for stop in sampling.stop)

    # -- routing ---------------------------------------------------------------------------------------

    async def _trace(self) -> RoutingTrace:
        needed = self._rows_needed()
        if self._rows.held(self._buffer[: self._length]) < needed:
            await self._recover_rows(needed)
        with waiting("routing"):
            return await self._rows.build(self._buffer[: self._length])

    def _rows_needed(self) -> int:
        """Rows up to the last sampled token; context after it is predicted by nobody."""
        end = self._length
        for segment in reversed(self._segments):
            if isinstance(segment, Sampled):
                break
            end -= len(segment.token_ids)
        return end - 1

    async def _recover_rows(self, needed: int) -> None:
        """Prefill once more, sampling nothing, for the rows that no call reported (its last call died or was
        aborted in a queue). They are of the weights served now, and the trace's spans say so.
        """
        token_ids = self._buffer[: needed + 1]
        for _ in range(_MAX_RECOVERIES):
            async with self._pool.lease(self.trajectory_id, needed + 1, prompt=needed + 1) as lease:
                request = self._request(lease, needed + 1, 0, SamplingParams())
                try:
                    async with aclosing(lease.generate(request)) as stream:
                        async for event in stream:
                            if isinstance(event, Finish):
                                self._rows.take(lease.engine, event, token_ids, needed + 1, recovery=True)
                except EngineError as error:
                    log.info("trajectory %s: its rows were not recovered: %s", self.trajectory_id, error)
            if self._rows.held(token_ids) >= needed:
                return
        # The rows stay invalid: the trainer replays those tokens natively, and they are counted.
        log.warning("trajectory %s: its last routing rows could not be recovered", self.trajectory_id)
