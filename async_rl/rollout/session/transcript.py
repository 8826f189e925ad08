"""The tokens of one trajectory: which engine calls write a turn, and what each of them adds.

```
 a turn ──► one or more engine calls ──► its tokens
             │ abort: keep the tokens, wait for an engine, call again with the rest
             │ the engine failed: the same, on another engine
             └ stop / length: the turn is complete
```

An engine looks for stop strings in the tokens of its own call. A stop string that an abort has split is found
here, as its tokens arrive; the turn then ends where an uninterrupted call would have ended.

All sampled tokens become segments under their own weight version when their call ends, however it ends.
Sampled tokens are never tokenised again: each call receives the token ids so far and appends its own. The
journal records everything; after a restart the agent loop runs again and receives what the journal has
(`session/restore.py`).

`session/routing_rows.py` collects the routing: each call requests the missing rows and adds those that it
returns. Rows that no call returned are recovered by a prefill without new tokens, or marked invalid.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import aclosing
from typing import Final, Literal

import msgspec
import numpy as np

from async_rl.engine_protocol import (
    Chunk,
    Finish,
    GenerateRequest,
    SamplingParams,
    check_partition,
)
from async_rl.engines.lease import Lease
from async_rl.errors import EngineBusy, EngineError, LocalShortage, VersionMismatch
from async_rl.rollout.session.context import SessionContext
from async_rl.rollout.session.restore import RestoredTurns
from async_rl.rollout.session.routing_rows import RoutingRows
from async_rl.rollout.session.stop_strings import StopStringAtSeam
from async_rl.rollout.session.tokens import (
    GrowingArray,
    GrowingMask,
    GrowingText,
    TokenLog,
)
from async_rl.runtime.waits import waiting
from async_rl.store.journal import JournalEntry
from async_rl.types import (
    Context,
    FinishReason,
    Float32Array,
    Int32Array,
    RoutingTrace,
    Sampled,
    SamplingMask,
    SamplingSettings,
    Segment,
    VersionSpan,
)

log = logging.getLogger(__name__)

_MAX_UNREQUESTED_ABORTS: Final = 8
"""The attempt fails after this many calls in a row that ended without a token and without a weight update."""

_MAX_RECOVERIES: Final = 4
"""The most attempts to fetch missing routing rows. Those that a weight update interrupts do not count."""

OpenBranchEntry = Callable[[str, Sequence[Segment]], JournalEntry]
"""Makes the journal's entry of a branch, from its id and the segments that it inherits."""


def entry_without_journal(trajectory_id: str, inherited: Sequence[Segment]) -> JournalEntry:
    """Make an entry that no journal writes."""
    return JournalEntry(trajectory_id, inherited=inherited)


class _WrongMask(EngineError):
    """An engine sent tokens whose sampling mask is missing or excludes them."""


class _RunningCall:
    """The tokens that one engine call has delivered so far."""

    def __init__(
        self,
        engine_id: str,
        since_version: int,
        sampling: SamplingSettings,
        *,
        one_version: bool,
        masked: bool,
    ) -> None:
        self.engine_id = engine_id
        self.sampling = sampling
        self.since_version = since_version
        self._one_version = one_version
        self._token_ids = GrowingArray(np.int32)
        self._log_probs = GrowingArray(np.float32)
        self._mask = GrowingMask() if masked else None
        self.versions: list[VersionSpan] = []
        self.finish: Finish | None = None

    @property
    def token_ids(self) -> Int32Array:
        """A view of the tokens so far, `[n] int32`."""
        return self._token_ids.values

    @property
    def log_probs(self) -> Float32Array:
        """A view of their log-probs, `[n] float32`, nats."""
        return self._log_probs.values

    def mask(self, start: int, end: int) -> SamplingMask | None:
        """Return the sampling mask of tokens; None if sampling is not truncated."""
        return None if self._mask is None else self._mask.part(start, end)

    def add_chunk(self, chunk: Chunk) -> None:
        """Keep tokens that the engine delivered.

        Only the engine's finish reports which weights sampled them. Until then they count as old as the call,
        because a token may have been in transit while the weights changed.

        Raises:
            _WrongMask: Their sampling mask is missing or wrong. A wrong one would renormalise their
                log-probs in the trainer over tokens that the engine did not choose from.
        """
        if self._mask is not None:
            mask = chunk.mask
            if mask is None or len(mask) != len(chunk.token_ids) or not (mask.counts > 0).all():
                raise _WrongMask(f"engine {self.engine_id} sent tokens without their sampling masks")
            if not mask.keeps(chunk.token_ids).all():
                raise _WrongMask(f"engine {self.engine_id} sent a token that its sampling mask excludes")
            self._mask.extend(mask)
        self._token_ids.extend(chunk.token_ids)
        self._log_probs.extend(chunk.log_probs)
        self._set_versions()

    def cut_non_finite(self) -> None:
        """Discard everything from the first log-prob on that is not finite."""
        bad = np.flatnonzero(~np.isfinite(self.log_probs))
        if len(bad):
            self._truncate(int(bad[0]))

    def clear(self) -> None:
        """Discard an invalid answer."""
        self._truncate(0)
        self.finish = None

    @property
    def spans(self) -> Sequence[VersionSpan]:
        """The versions that the engine reported, or the call's own version if it ended before that."""
        return self.finish.version_spans if self.finish is not None and self._is_reported else self.versions

    @property
    def versions_reported(self) -> list[int]:
        """The versions of the tokens, and of the routing rows."""
        routing = None if self.finish is None else self.finish.routing
        return [span.weight_version for span in self.spans] + (
            [] if routing is None else [routing.weight_version]
        )

    @property
    def lag_unknown(self) -> bool:
        """Implements `OpenCall.lag_unknown`: updates that do not abort calls change weights during them."""
        return not (self._one_version or self._is_reported)

    @property
    def _is_reported(self) -> bool:
        """Whether the engine has reported the versions."""
        finish = self.finish
        return finish is not None and (finish.reason != "abort" or len(finish.version_spans) > 0)

    def _truncate(self, length: int) -> None:
        self._token_ids.truncate(length)
        self._log_probs.truncate(length)
        if self._mask is not None:
            self._mask.truncate(length)
        self._set_versions()

    def _set_versions(self) -> None:
        num = len(self._token_ids)
        self.versions = [VersionSpan(start=0, end=num, weight_version=self.since_version)] if num else []


class Transcript:
    """Writes the tokens of one trajectory by calling engines, and collects their routing rows."""

    def __init__(
        self,
        context: SessionContext,
        entry: JournalEntry,
        open_branch_entry: OpenBranchEntry = entry_without_journal,
        *,
        group_id: str = "",
    ) -> None:
        """Start the transcript of the trajectory that a journal's entry names.

        Args:
            context: What all sessions of the run share.
            entry: Records the trajectory, and holds what an earlier process sampled of it.
            open_branch_entry: Makes the entry of a branch.
            group_id: The group of the trajectory, whose other trajectories begin with the same prompt.
        """
        self.trajectory_id = entry.trajectory_id
        self.tokens = TokenLog(entry.segments, context.config.rollout.max_context_tokens)
        self._context = context
        self._entry = entry
        self._open_branch_entry = open_branch_entry
        self._group_id = group_id
        self._restored = None if entry.restored is None else RestoredTurns(entry.restored)
        self._rows = RoutingRows(entry.trajectory_id, context)

    def open_branch(self, trajectory_id: str, *, inherits: bool) -> Transcript:
        """Return the transcript of another trajectory of the same attempt.

        Args:
            trajectory_id: Names the new trajectory.
            inherits: Whether it begins with all tokens and routing rows so far, instead of none.
        """
        entry = self._open_branch_entry(trajectory_id, tuple(self.tokens.segments) if inherits else ())
        other = Transcript(self._context, entry, self._open_branch_entry, group_id=self._group_id)
        if inherits:
            other.tokens.inherit_tokens(self.tokens)
            other._rows = self._rows.branch()
            self._context.calls.share_cached_prefix(self.trajectory_id, trajectory_id)
        return other

    def discard_rows(self) -> None:
        """Free the routing rows: there will be no trajectory."""
        self._rows.discard()

    def append_context(self, token_ids: Int32Array) -> None:
        """Append tokens that the policy did not write, and compare them with what is being restored."""
        if self._restored is not None:
            self._restored.match_context(token_ids)
            self._end_restore()
        self.tokens.append_segment(Context(token_ids=token_ids))

    def release_engine(self) -> None:
        """Tell the pool that this trajectory makes no more turns."""
        self._context.calls.forget_trajectory(self.trajectory_id, self._group_id)

    async def write_turn(
        self,
        budget: int,
        stop: Sequence[str],
        listener: GrowingText | None = None,
        constraint: str | None = None,
    ) -> Literal["stop", "length"]:
        """Let the policy write one turn, over one or more engine calls.

        Args:
            budget: The most tokens of the turn.
            stop: Strings that end the turn, beside the chat format's stop tokens.
            listener: Receives the tokens as they are sampled.
            constraint: What the text of the turn follows.

        Returns:
            How the turn ended.

        Raises:
            EngineError: Engines kept ending its calls without a token, or a constrained turn was interrupted:
                engines follow a grammar from the first token of a call on.
        """
        rollout, tokens = self._context.config.rollout, self.tokens
        sampling = SamplingParams(
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
            stop_token_ids=tuple(self._context.chat.stop_token_ids),
            stop=tuple(stop),
            constraint=constraint,
        )
        begin, unrequested = len(tokens), 0
        reason = self._restore_turn(budget, stop)
        last = len(tokens)
        resumed = last > begin
        if listener is not None and resumed:
            listener.add_tokens(tokens.token_ids[begin:last].tolist())
        while reason is None:
            if self._has_stopped(begin, sampling):
                reason = "stop"  # the call was cut short between its last token and its finish
                break
            if (left := budget - (len(tokens) - begin)) <= 0:
                reason = "length"
                break
            if constraint is not None and len(tokens) > begin:
                raise EngineError(
                    f"a constrained turn of trajectory {self.trajectory_id} was interrupted after "
                    f"{len(tokens) - begin} tokens: engines cannot continue a grammar"
                )
            seam = None
            if stop and len(tokens) > begin:
                seam = StopStringAtSeam(self._context.chat.raw_text, stop, tokens.token_ids[begin:])
            ended, ours = await self._call_engine(left, sampling, listener, seam, resumed=resumed)
            if ended == "stop" or ended == "length":
                reason = ended
                break
            resumed = True
            unrequested = 0 if ours or len(tokens) > last else unrequested + 1
            last = len(tokens)
            if unrequested > _MAX_UNREQUESTED_ABORTS:
                raise EngineError(
                    f"engines ended {unrequested} calls of trajectory {self.trajectory_id} in a row without "
                    "an interruption by a weight update: see the engines' logs"
                )
        self._entry.end_turn(len(tokens), reason)
        return reason

    async def _call_engine(
        self,
        budget: int,
        sampling: SamplingParams,
        listener: GrowingText | None,
        seam: StopStringAtSeam | None,
        *,
        resumed: bool,
    ) -> tuple[FinishReason, bool]:
        """Make one engine call and keep its tokens.

        Returns:
            Why the call ended, and whether it is explained: by a weight update, or by an engine that is busy.
        """
        tokens, metrics, clock = self.tokens, self._context.metrics, self._context.clock
        prompt = len(tokens)
        async with self._context.calls.lease(
            self.trajectory_id, prompt + budget, prompt=prompt, group=self._group_id
        ) as lease:
            call = self._entry.call = _RunningCall(
                lease.engine.engine_id,
                lease.weight_version,
                sampling.settings,
                one_version=self._context.config.weights.interrupt == "abort",
                masked=self._context.config.rollout.replay_sampling and sampling.truncates,
            )
            if resumed:
                tokens.num_resumes += 1
                metrics.resumes_total.inc()
            request = self._request(lease, prompt, budget, sampling)
            if listener is not None or seam is not None:
                request = msgspec.structs.replace(request, stream_interval=1)  # each token is looked at
            began_s = clock()
            first_token_s: float | None = None
            reason: FinishReason = "failover"
            refused = cut = False
            try:
                async with aclosing(lease.generate(request)) as stream:
                    async for event in stream:
                        if isinstance(event, Chunk):
                            if first_token_s is None:
                                first_token_s = clock()
                            end = None if seam is None else seam.find_end(event.token_ids.tolist())
                            if end is not None:
                                event = event.first(end)
                            call.add_chunk(event)
                            if listener is not None:
                                listener.add_tokens(event.token_ids.tolist())
                            if end is not None:
                                # Leaving the stream aborts the call, which would sample on.
                                cut, reason = True, "stop"
                                break
                        else:
                            call.finish = event
                            reason = event.reason
            except (EngineBusy, LocalShortage):
                refused = True  # the pool makes it wait, so it counts as no failure of the attempt
            except _WrongMask as error:
                reason = "failover"
                self._record_discarded(lease, "wrong_mask", error)
            except VersionMismatch:  # what it has sampled before is of unknown weights
                reason = "failover"
                call.clear()
                metrics.answers_discarded_total.labels("wrong_versions").inc()
            except EngineError:
                reason = "failover"
            else:
                if not self._check_answer(call, lease, cut=cut):
                    reason = "failover"
            finally:
                # Also on cancellation: sampled tokens are a segment before any other task runs.
                self._append_call(call, lease, reason, prompt)
                self._entry.call = None
                ended_s = clock()
                tokens.engine_s += ended_s - began_s
                tokens.first_token_s += (ended_s if first_token_s is None else first_token_s) - began_s
                if call.finish is not None and len(call.token_ids):  # else it reports nothing of its cache
                    tokens.prefilled_tokens += max(0, prompt - call.finish.cached_tokens)
            ours = refused or (reason == "abort" and lease.interrupted)
        if reason == "failover" and not refused:
            tokens.num_failovers += 1
            metrics.failovers_total.inc()
        if reason == "abort" or len(call.spans) > 1:
            count = max(1, len(call.spans) - 1) if reason != "abort" else 1
            tokens.num_interruptions += count
            metrics.interruptions_total.inc(count)
            if reason != "abort":  # the engine resumed the call itself (retract, in_place)
                tokens.num_resumes += count
                metrics.resumes_total.inc(count)
        return reason, ours

    def _check_answer(self, call: _RunningCall, lease: Lease, *, cut: bool) -> bool:
        """Return whether an answer is valid; discard an invalid one and report its engine.

        Args:
            call: The call, which has ended.
            lease: Its engine.
            cut: Whether we left it at a stop string, before its finish.
        """
        engine_id, kind = lease.engine.engine_id, EngineError
        if call.finish is None and not cut:
            reason, problem = "no_finish", f"engine {engine_id} ended a stream without a finish"
        elif not check_partition(call.spans, len(call.token_ids)):
            reason = "wrong_versions"
            problem = (
                f"engine {engine_id} reports weight versions {call.spans} for "
                f"{len(call.token_ids)} sampled tokens"
            )
        elif foreign := self._foreign_versions(call.versions_reported, call.since_version, engine_id):
            (reason, problem), kind = foreign, VersionMismatch
        elif not np.isfinite(call.log_probs).all():
            reason, problem = "not_finite", f"engine {engine_id} returned log-probs that are not finite"
        else:
            return True
        call.clear()
        self._record_discarded(lease, reason, kind(problem))
        return False

    def _foreign_versions(
        self, versions: Collection[int], since_version: int, engine_id: str
    ) -> tuple[str, str] | None:
        """Return why these versions cannot belong to a call that began at `since_version`.

        Returns:
            The reason, a label of `answers_discarded_total`, and the problem; None when they can.
        """
        newest = self._context.calls.newest_version
        if any(version < since_version for version in versions):
            # Its group would be older than the driver knows. A restarted server has its first weights.
            return "older_weights", (
                f"engine {engine_id} reports weight versions {versions} under a lease of version "
                f"{since_version}"
            )
        if any(version > newest for version in versions):
            # Its tokens would be trained as fresher than any; somebody else updates the engine.
            return "unpublished_weights", (
                f"engine {engine_id} reports weight versions {versions}, but this run has published none "
                f"after {newest}: does another run update it?"
            )
        return None

    def _record_discarded(self, lease: Lease, reason: str, error: EngineError) -> None:
        """Count an answer that is discarded, and report its engine."""
        self._context.metrics.answers_discarded_total.labels(reason).inc()
        lease.record_strike(error)

    def _request(
        self, lease: Lease, num_tokens: int, max_new_tokens: int, sampling: SamplingParams
    ) -> GenerateRequest:
        """Build a call that continues the first `num_tokens` tokens and requests the missing routing rows."""
        token_ids, wanted, start = (
            self.tokens.token_ids[:num_tokens],
            self._context.config.routing.from_engine,
            0,
        )
        if wanted:
            start = self._rows.next_start(token_ids, lease.engine.engine_id, lease.weight_version)
        return GenerateRequest(
            request_id=f"{self._context.new_id()}-{lease.epoch_name}",
            input_ids=token_ids,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            return_mask=max_new_tokens > 0
            and self._context.config.rollout.replay_sampling
            and sampling.truncates,
            return_routing=wanted,
            routing_start=start,
            rows_if_aborted=self._rows.needs_aborted,
        )

    def _append_call(self, call: _RunningCall, lease: Lease, reason: FinishReason, prompt: int) -> None:
        """Append a call's tokens as one segment for each weight version, and keep its routing rows."""
        if call.finish is None:
            call.cut_non_finite()  # a call that was cut short has not been checked as a whole
        for span in call.spans:
            if span.end <= span.start:
                continue
            self.tokens.append_segment(
                Sampled(
                    token_ids=call.token_ids[span.start : span.end].copy(),
                    rollout_log_probs=call.log_probs[span.start : span.end].copy(),
                    mask=call.mask(span.start, span.end),
                    weight_version=span.weight_version,
                    engine_id=lease.engine.engine_id,
                    finish_reason=reason,
                    lag_unknown=call.lag_unknown,
                    sampling=call.sampling,
                )
            )
        self._context.metrics.sampled_tokens_total.inc(len(call.token_ids))
        if call.finish is not None:
            self._rows.add_answer(lease, call.finish, self.tokens.token_ids, prompt)

    def _restore_turn(self, budget: int, stop: Sequence[str]) -> Literal["stop", "length"] | None:
        """Append what the journal has of the turn that begins; return how it ended, or None if it had not."""
        tokens = self.tokens
        self._entry.begin_turn(len(tokens), budget, stop)
        if self._restored is None:
            return None
        sampled, ended = self._restored.next_turn(len(tokens), budget, stop)
        for segment in sampled:
            tokens.append_segment(segment)
            tokens.num_interruptions += segment.finish_reason == "abort"
            tokens.num_failovers += segment.finish_reason == "failover"
        tokens.num_resumes += max(0, len(sampled) - 1)
        self._context.metrics.resumed_tokens_total.inc(sum(len(segment.token_ids) for segment in sampled))
        self._end_restore()
        return None if ended is None else ended.reason

    def _end_restore(self) -> None:
        """Go on live once nothing is left to restore."""
        if self._restored is not None and self._restored.is_exhausted:
            if self._restored.num_discarded:
                log.warning(
                    "trajectory %s went another way than before the restart: %d tokens are discarded",
                    self.trajectory_id,
                    self._restored.num_discarded,
                )
                self._context.metrics.resume_discarded_tokens_total.inc(self._restored.num_discarded)
            self._restored = None
            self._entry.end_restoring()

    def _has_stopped(self, begin: int, sampling: SamplingParams) -> bool:
        """Return whether the turn that began at `begin` ends in a stop token or contains a stop string."""
        token_ids = self.tokens.token_ids
        if len(token_ids) == begin:
            return False
        if int(token_ids[-1]) in sampling.stop_token_ids:
            return True
        if not sampling.stop:
            return False
        text = self._context.chat.raw_text(token_ids[begin:])
        return any(stop in text for stop in sampling.stop)

    # -- routing ---------------------------------------------------------------------------------------

    async def build_trace(self) -> RoutingTrace | None:
        """Return the routing of the finished trajectory, checked; None if the run does not use it.

        Raises:
            AlignmentError: The routing does not fit the tokens.
        """
        if not self._context.config.routing.from_engine:
            return None
        needed = self._num_rows_needed()
        if self._rows.num_held(self.tokens.token_ids) < needed:
            await self._recover_rows(needed)
        with waiting("routing"):
            return await self._rows.build_trace(self.tokens.token_ids)

    def _num_rows_needed(self) -> int:
        """Return the number of rows up to the last sampled token; no loss uses a row after it."""
        end = len(self.tokens)
        for segment in reversed(self.tokens.segments):
            if isinstance(segment, Sampled):
                break
            end -= len(segment.token_ids)
        return end - 1

    async def _recover_rows(self, needed: int) -> None:
        """Prefill once more, without sampling, for rows that no call returned.

        Rows are missing if the last call failed, was cut, or was restored from the journal. Recovered rows
        belong to the weights that are served now, and the trace's spans record that.
        """
        with waiting("routing"):
            await self._context.recoveries.acquire()
        try:
            failures = 0
            while failures < _MAX_RECOVERIES:
                failures += not await self._request_rows(needed)
                if self._rows.num_held(self.tokens.token_ids) >= needed:
                    return
        finally:
            self._context.recoveries.release()
        # The rows stay invalid: the trainer routes these tokens itself, and metrics count them.
        log.warning("trajectory %s: its last routing rows could not be recovered", self.trajectory_id)

    async def _request_rows(self, needed: int) -> bool:
        """Make one call for missing rows; return whether it says nothing about the next one.

        So it is if a weight update ended it, if this process had no descriptor for it, and if its engine was
        busy. The pool waits before the next lease then.
        """
        sampled = next(s for s in reversed(self.tokens.segments) if isinstance(s, Sampled))
        token_ids, finish = self.tokens.token_ids[: needed + 1], None
        async with self._context.calls.lease(self.trajectory_id, needed + 1, prompt=needed + 1) as lease:
            request = self._request(lease, needed + 1, 0, SamplingParams())
            since_version = lease.weight_version
            try:
                async with aclosing(lease.generate(request)) as stream:
                    async for event in stream:
                        if isinstance(event, Finish):
                            finish = event
            except EngineError as error:
                log.info("trajectory %s: its rows were not recovered: %s", self.trajectory_id, error)
                return isinstance(error, LocalShortage | EngineBusy)
            if finish is None:
                return False
            if finish.routing is not None:
                versions = [finish.routing.weight_version]
                if foreign := self._foreign_versions(versions, since_version, lease.engine.engine_id):
                    reason, problem = foreign
                    self._record_discarded(lease, reason, VersionMismatch(problem))
                    return False
            version = sampled.weight_version
            self._rows.add_answer(lease, finish, token_ids, needed + 1, recovered_version=version)
            return finish.reason == "abort" and lease.interrupted
