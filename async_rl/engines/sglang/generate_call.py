"""One generate call in SGLang's format: its request, the events of its reply, and the account of them.

```
encode_request ─► POST /generate ─► reads ─► EventReader ─► events ─► CallAccount ─► Chunk …  Finish
                                                 └─ routing payload ─► RoutingText ─┘
```

The types here declare only the fields that are read or written. A routing payload stays undecoded.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Annotated, Final, Literal, cast

import msgspec
import numpy as np

from async_rl.engine_protocol import (
    Chunk,
    Finish,
    GenerateRequest,
    Retraction,
    RoutingPayload,
    check_partition,
)
from async_rl.engines.sglang.aborted_rows import OMIT_ABORTED_ROWS
from async_rl.engines.sglang.routing_payload import RoutingText
from async_rl.errors import (
    AlignmentError,
    CallLost,
    EngineBusy,
    EngineError,
    RequestRefused,
    VersionMismatch,
)
from async_rl.runtime.untrusted_json import UNREADABLE
from async_rl.types import Float32Array, SamplingMask, VersionSpan


class _SamplingParams(msgspec.Struct):
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    stop_token_ids: tuple[int, ...] | None
    stop: tuple[str, ...] | None
    # Stop strings may hold special tokens, and sampled tokens are never trimmed.
    skip_special_tokens: bool = False
    no_stop_trim: bool = True
    custom_params: dict[str, bool] | None = None
    structural_tag: str | None = None
    stream_interval: int = 1


SENT_SETTINGS: Final = frozenset(_SamplingParams.__struct_fields__)
"""The sampling settings that each call has, whatever the server prefers."""


class _Body(msgspec.Struct):
    rid: str
    input_ids: list[int]
    sampling_params: _SamplingParams
    return_routed_experts: bool
    return_sampling_mask: bool
    routed_experts_start_len: int
    logprob_start_len: int = -1
    # The name of a loaded adapter; without it the server computes with the base model alone.
    lora_path: str | msgspec.UnsetType = msgspec.UNSET
    return_logprob: bool = True
    stream: bool = True


class _FinishReason(msgspec.Struct, gc=False):
    type: str
    message: str | None = None
    status_code: int | None = None


class _WeightSpan(msgspec.Struct, gc=False):
    version: str
    start: int
    end: int


_LOG_PROB_ROUNDING: Final = 1e-3
"""How far above 0 rounding may leave a log-prob: a sum of bfloat16 probabilities can exceed 1 by this."""

# The decoder checks what it can: in Python the checks of an event took twice as long as its decoding.
_TokenId = Annotated[int, msgspec.Meta(ge=0)]
_LogProb = Annotated[float, msgspec.Meta(le=_LOG_PROB_ROUNDING)] | None
_Scored = tuple[_LogProb, int, str | None]
"""A token in a list of log-probs: its log-prob, its id, its text."""


class _Meta(msgspec.Struct, gc=False):
    completion_tokens: int = 0
    output_token_logprobs: list[_Scored] = []
    input_token_logprobs: list[tuple[float | None, int, str | None]] = []
    finish_reason: _FinishReason | None = None
    weight_version: str | None = None
    weight_versions: list[_WeightSpan] | None = None
    cached_tokens: int = 0
    num_retractions: int = 0
    output_token_sampling_mask: list[list[int]] = []
    output_token_sampling_logprobs: list[_LogProb] = []
    routed_experts: msgspec.Raw = msgspec.Raw()


class _Refusal(msgspec.Struct, gc=False):
    message: str = ""
    code: int = 400


class _Event(msgspec.Struct, gc=False):
    output_ids: list[_TokenId] = []
    meta_info: _Meta | None = None
    error: _Refusal | None = None


_LARGEST_EVENT_BYTES: Final = 1 << 20
"""An event without tokens; a server's message of an error is the longest."""

_TOKEN_BYTES: Final = 256
"""One token in an event: its id twice, its log-prob, and its text."""

_KEPT_ID_BYTES: Final = 12
"""One id of a sampling mask in an event, with its comma."""

_STREAMS_PER_TOKEN: Final = 64
"""With 64 more streams, events have one more token: 64 streams at 40 tokens/s take a thirtieth of a core."""

_LONGEST_INTERVAL: Final = 8

_RESERVED_LENGTH: Final = 2
"""SGLang ends a sequence this many tokens before the context is full (`managers/tp_worker.py`, `max_req_len`,
and `managers/scheduler.py`)."""

_FIELD: Final = b"data: "
_END: Final = b"\n\n"
_PAYLOAD: Final = b'"routed_experts":"'

_LARGE: Final = 1 << 16
"""Bytes of an unfinished event above which its payload is separated; below, it is not worth searching."""

_MAX_VERSION_DIGITS: Final = 18
"""More digits do not fit 64 bits, and Python refuses to parse thousands of them."""

_encode = msgspec.json.Encoder().encode
_decode_event = msgspec.json.Decoder(_Event).decode


def choose_stream_interval(num_streams: int) -> int:
    """Return the number of tokens per event for one more stream beside those that this process reads.

    An event costs the server and the reader about as much as eight tokens do. A longer interval would save
    little more, and an engine that dies takes the tokens that it has not sent.

    Example:
        >>> [choose_stream_interval(streams) for streams in (0, 127, 128, 400, 4096)]
        [1, 1, 2, 6, 8]
    """
    return min(max(1, num_streams // _STREAMS_PER_TOKEN), _LONGEST_INTERVAL)


def adapter_name(weight_version: int) -> str:
    """Return the name under which the adapter of a version is loaded.

    Names differ between versions, so a call that is late never gets another version than it was meant for.
    """
    return f"policy-v{weight_version}"


def encode_request(request: GenerateRequest, stream_interval: int = 1, *, adapter: bool = False) -> bytes:
    """Return the body of POST /generate.

    Args:
        request: What to generate.
        stream_interval: Tokens per event, if the request leaves it open.
        adapter: Whether the server computes it with the adapter of the request's version.

    Raises:
        ValueError: When the request has no version: the base model would answer in the policy's place.
    """
    sampling = request.sampling
    lora_path: str | msgspec.UnsetType = msgspec.UNSET
    if adapter:
        if request.weight_version is None:
            raise ValueError(f"the call {request.request_id} has no weight version to choose an adapter by")
        lora_path = adapter_name(request.weight_version)
    return _encode(
        _Body(
            rid=request.request_id,
            input_ids=request.input_ids.tolist(),
            sampling_params=_SamplingParams(
                max_new_tokens=request.max_new_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
                stop_token_ids=sampling.stop_token_ids or None,
                stop=sampling.stop or None,
                stream_interval=request.stream_interval or stream_interval,
                custom_params=None if request.rows_if_aborted else {OMIT_ABORTED_ROWS: True},
                structural_tag=sampling.constraint,
            ),
            return_routed_experts=request.return_routing,
            return_sampling_mask=request.return_mask,
            routed_experts_start_len=request.routing_start,
            # The first position that is asked for has no log-prob.
            logprob_start_len=-1 if request.score_from is None else request.score_from - 1,
            lora_path=lora_path,
        )
    )


def parse_version(engine_id: str, text: str | None) -> int:
    """Parse a weight version.

    Raises:
        VersionMismatch: When it is not a decimal integer, as all versions that the trainer publishes are.
    """
    if text is None or not text.isdecimal() or len(text) > _MAX_VERSION_DIGITS:
        raise VersionMismatch(
            f"{engine_id} serves weights of version {text!r:.40}, which this run did not publish: "
            f"versions are decimal integers"
        )
    return int(text)


class EventTooLong(Exception):
    """A server sends an event that is longer than any that the request can need."""


class EventReader:
    """Splits network reads into server-sent events, and separates the routing payload from the last one.

    The last event of a long call has megabytes of base64 in a kilobyte of JSON. The reader only searches it
    for the next quote and passes it on read by read: no JSON parser scans it, nothing is copied or joined,
    and the event loop is never blocked.

    An event is a JSON document and the payload that was separated from it, with an empty string in its place.
    A small payload stays in the document.

    Invariant: it holds at most `max_event_bytes` and one read, and searches each byte once, however the
    server cuts its stream.
    """

    def __init__(self, open_payload: Callable[[], RoutingText], max_event_bytes: int) -> None:
        """Start before the first event.

        Args:
            open_payload: Called at the start of each payload.
            max_event_bytes: Longest event, without a payload that was separated from it.
        """
        self._open_payload = open_payload
        self._max_event_bytes = max_event_bytes
        self._rest = bytearray()  # an event that is not complete
        self._searched = 0  # bytes of it in which no payload begins
        self._mark: int | None = None  # where its payload begins
        self._filling = False
        self.payload: RoutingText | None = None
        """The payload of the event that is arriving, or arrived last."""
        self._taken: RoutingText | None = None

    @property
    def head(self) -> bytes | None:
        """The document of the event whose payload is arriving, with an empty payload; None if there is none.

        What follows the payload is missing. SGLang writes it last, in `meta_info`.
        """
        if self._mark is None:
            return None
        return bytes(self._rest[len(_FIELD) : self._mark]) + b'"}}'

    def feed(self, data: bytes) -> list[tuple[bytes, RoutingText | None]]:
        """Return the events that one read completes.

        Raises:
            EventTooLong: When an event is longer than `max_event_bytes`; the reader is of no more use then.
        """
        if self._filling and self.payload is not None:
            end = data.find(b'"')
            if end < 0:
                self.payload.append_text(data)
                return []
            self.payload.append_text(data[:end])
            self._taken, self._filling = self.payload, False
            data = data[end:]
        if self._rest:
            begin = max(0, len(self._rest) - 1)  # the end may be cut in two
            self._rest += data
            if self._rest.find(_END, begin) < 0:
                self._look_for_payload()
                return []
            data = bytes(self._rest)
            self._rest.clear()
            self._searched, self._mark = 0, None
        *complete, rest = data.split(_END)
        events: list[tuple[bytes, RoutingText | None]] = [
            (event[len(_FIELD) :], None) for event in complete if event.startswith(_FIELD)
        ]
        if events and self._taken is not None:
            events[0] = events[0][0], self._taken
            self._taken = None
        if rest:
            self._rest += rest
            self._look_for_payload()
        return events

    def _look_for_payload(self) -> None:
        """Look where the payload of the unfinished event begins, and separate it if the event is long."""
        if self._mark is None:
            found = self._rest.find(_PAYLOAD, self._searched)
            self._searched = max(0, len(self._rest) - len(_PAYLOAD) + 1)
            self._mark = found + len(_PAYLOAD) if found >= 0 else None
        if self._mark is not None and self._taken is None and len(self._rest) > _LARGE:
            self._take_payload(self._mark)
        if len(self._rest) > self._max_event_bytes:
            raise EventTooLong(
                f"an event of more than {self._max_event_bytes} bytes, which is more than the call can need"
            )

    def _take_payload(self, begin: int) -> None:
        end = self._rest.find(b'"', begin)
        self._filling = end < 0
        self.payload = self._open_payload()
        self.payload.append_text(bytes(self._rest[begin:] if self._filling else self._rest[begin:end]))
        if self._filling:
            del self._rest[begin:]
        else:
            self._taken = self.payload
            del self._rest[begin:end]


class CallAccount:
    """Collects what one call has delivered, so that no token, log-prob or row is delivered twice.

    SGLang reports with every event how many tokens the call has so far. Tokens that an event repeats are cut
    off, and missing ones end the call with an error. So do tokens that are not in the vocabulary, more tokens
    than were requested, log-probs above 0, an end at a length that was not requested, an event after the end,
    and events of several weight versions without the versions of the tokens.
    """

    def __init__(
        self, engine_id: str, request: GenerateRequest, vocab_size: int, longest: int = sys.maxsize
    ) -> None:
        """Begin with nothing delivered.

        Args:
            engine_id: The engine.
            request: The call.
            vocab_size: That of the model.
            longest: The server's context length, at which a call may end before `max_new_tokens`.
        """
        self.delivered = 0
        """Number of tokens so far."""
        self.cut_short = False
        """Whether a chunk had fewer log-probs than tokens; it was cut to them, and no chunk can follow it."""
        self._engine_id = engine_id
        self._request = request
        self._vocab_size = vocab_size
        self._longest = longest - _RESERVED_LENGTH
        self._token_ids: list[int] = []  # those of `take_chunk`
        self._scored: list[_Scored] = []  # the same tokens
        self._num_retractions = 0
        self._unreported_retractions = 0  # those of `take_chunk`
        self._retractions: list[Retraction] = []
        self._masks: list[SamplingMask] = []
        self._versions = set[str | None]()  # of the events
        self._has_ended = False

    @property
    def max_event_bytes(self) -> int:
        """The longest event that the call can need, without a payload that was separated from it."""
        request, token_bytes = self._request, _TOKEN_BYTES
        if request.return_mask:
            token_bytes += _KEPT_ID_BYTES * max(1, request.sampling.top_k)
        scored = 0 if request.score_from is None else len(request.input_ids) - request.score_from + 1
        return _LARGEST_EVENT_BYTES + token_bytes * (request.max_new_tokens + scored)

    @property
    def max_rows(self) -> int:
        """The most routing rows that the call can return."""
        request = self._request
        return max(0, len(request.input_ids) + request.max_new_tokens - 1 - request.routing_start)

    @property
    def num_rows(self) -> int:
        """Number of routing rows of the tokens fed so far, from `routing_start` on."""
        fed = len(self._request.input_ids) + self.delivered - 1
        return max(0, fed - self._request.routing_start)  # 0, not -1, where no token was fed since

    def take_chunk(self) -> Chunk | None:
        """Return the tokens of the events since the last call; None if there are none."""
        if not self._token_ids:
            return None
        mask = SamplingMask.joined(self._masks) if self._request.return_mask else None
        # JSON has no NaN: it arrives as null. The chunk has NaN, so that the caller sees that it is missing.
        log_probs = [log_prob for log_prob, _, _ in self._scored]
        chunk = Chunk.of(self._token_ids, log_probs, mask)
        if self._unreported_retractions:
            chunk = msgspec.structs.replace(chunk, num_retractions=self._unreported_retractions)
            self._unreported_retractions = 0
        self._token_ids, self._scored, self._masks = [], [], []
        return chunk

    def read_event(self, document: bytes, payload: RoutingText | None) -> Finish | None:
        """Add the tokens of an event to the next chunk; return the end of the call if it is the last event.

        Args:
            document: The event's JSON.
            payload: Its routing, if `EventReader` has taken it out; narrowed so far.

        Raises:
            EngineError: When the server refuses the call, or the event does not continue it.
            RequestRefused: When the server says that the request is wrong.
        """
        try:
            event = _decode_event(document)
        except UNREADABLE as e:
            raise EngineError(
                f"{self._engine_id} sent an event that is wrong or of an unknown format: {e}"
            ) from e
        meta = event.meta_info
        if event.error is not None or meta is None:
            raise self._refusal(event.error or _Refusal(message="an event without meta_info"))
        finish = meta.finish_reason
        if finish is not None and finish.type == "abort" and finish.status_code is not None:
            raise self._refusal(_Refusal(message=finish.message or "", code=finish.status_code))
        if self._has_ended:
            raise EngineError(f"{self._engine_id} sent an event after the end of {self._request.request_id}")
        self._versions.add(meta.weight_version)
        if meta.num_retractions > self._num_retractions:
            self._add_retractions(meta)
        self._add_tokens(event.output_ids, meta)
        if finish is None:
            return None
        self._has_ended = True
        return self._finish(meta, finish, payload, omits_rows=self._omits_rows(event))

    def ends_without_rows(self, head: bytes | None) -> bool:
        """Whether the rows that an event is about to deliver are not needed.

        Args:
            head: The event's JSON without what follows the rows, `EventReader.head`.
        """
        if head is None or self._request.rows_if_aborted:
            return False
        try:
            return self._omits_rows(_decode_event(head))
        except UNREADABLE:
            return False  # another order of the fields: the event is read to its end

    def _omits_rows(self, event: _Event) -> bool:
        """Whether an event ends the call by an abort, and the call did not end by itself in the same step."""
        meta, request = event.meta_info, self._request
        if request.rows_if_aborted or meta is None or meta.finish_reason is None:
            return False
        if meta.finish_reason.type != "abort" or meta.finish_reason.status_code is not None:
            return False
        stopped = event.output_ids and event.output_ids[-1] in request.sampling.stop_token_ids
        return not stopped and meta.completion_tokens < request.max_new_tokens

    def _add_retractions(self, meta: _Meta) -> None:
        """Record retractions that an event is the first to report, before its tokens are added."""
        count = meta.num_retractions - self._num_retractions
        self._unreported_retractions += count
        self._retractions.append(
            Retraction(
                at_least=self.delivered,
                at_most=max(self.delivered, meta.completion_tokens - 1),
                count=count,
            )
        )
        self._num_retractions = meta.num_retractions

    def _add_tokens(self, token_ids: list[int], meta: _Meta) -> None:
        """Add the new tokens of an event.

        An abort of a retracted request repeats its last token, after those that SGLang had not sent yet
        (`TokenizerManager._coalesce_streaming_chunks`), and all its log-probs, the new ones last.
        """
        new = meta.completion_tokens - self.delivered
        aborted = meta.finish_reason is not None and meta.finish_reason.type == "abort"
        if new == 0 and (aborted or not token_ids):
            return
        if self.cut_short or not 0 < new <= len(token_ids):
            raise EngineError(
                f"{self._engine_id} counts {meta.completion_tokens} tokens of the call "
                f"{self._request.request_id}, but {self.delivered} were delivered and {len(token_ids)} came"
            )
        if new < len(token_ids):
            if meta.finish_reason is None:
                raise EngineError(
                    f"{self._engine_id} repeats tokens in its stream: start it with "
                    f"--incremental-streaming-output"
                )
            # The repeated token follows those that were still to be sent in the same event.
            token_ids = token_ids[:new] if aborted else token_ids[len(token_ids) - new :]
        scored, masks = meta.output_token_logprobs, list[SamplingMask]()
        if self._request.return_mask:
            masks = [self._read_masks(meta, new)]
            scored = [(log_prob, 0, None) for log_prob in meta.output_token_sampling_logprobs]
        if len(scored) > new:
            scored = scored[len(scored) - new :]
        elif len(scored) < new:
            self.cut_short = True
            token_ids = token_ids[: len(scored)]
            if not token_ids:
                return
        self._check_tokens(token_ids)
        if not masks and token_ids != [token_id for _, token_id, _ in scored]:
            raise EngineError(
                f"{self._engine_id} sent log-probs of other tokens than those of the call "
                f"{self._request.request_id}"
            )
        self.delivered += len(token_ids)
        self._token_ids += token_ids
        self._scored += scored
        self._masks += masks

    def _read_masks(self, meta: _Meta, new: int) -> SamplingMask:
        """Return the sampling masks of an event's new tokens.

        An aborted call may lack those of its last tokens, like their log-probs: `cut_short` then cuts both.
        """
        kept = meta.output_token_sampling_mask[-new:]
        if len(kept) != len(meta.output_token_sampling_logprobs[-new:]):
            raise EngineError(
                f"{self._engine_id} sent {len(meta.output_token_sampling_mask)} sampling masks and "
                f"{len(meta.output_token_sampling_logprobs)} log-probs of the same tokens"
            )
        try:
            return SamplingMask.of(kept, self._vocab_size)  # ties may exceed top_k
        except ValueError as error:
            raise EngineError(f"{self._engine_id} sent a wrong sampling mask: {error}") from error

    def _check_tokens(self, token_ids: list[int]) -> None:
        request = self._request
        if self.delivered + len(token_ids) > request.max_new_tokens:
            raise EngineError(
                f"{self._engine_id} sent {self.delivered + len(token_ids)} tokens of the call "
                f"{request.request_id}, which asked for at most {request.max_new_tokens}"
            )
        if (largest := max(token_ids)) >= self._vocab_size:
            raise EngineError(
                f"{self._engine_id} sent the token id {largest}, outside the vocabulary of "
                f"{self._vocab_size}: does it serve this model?"
            )

    def _finish(
        self, meta: _Meta, finish: _FinishReason, payload: RoutingText | None, *, omits_rows: bool
    ) -> Finish:
        if finish.type not in ("stop", "length", "abort"):
            raise EngineError(f"{self._engine_id} finished for an unknown reason {finish.type!r}")
        length, limit = len(self._request.input_ids) + self.delivered, self._request.max_new_tokens
        if finish.type == "length" and self.delivered < limit and length < self._longest:
            raise EngineError(
                f"{self._engine_id} ended the call {self._request.request_id} at its length, after "
                f"{self.delivered} of {limit} tokens"
            )
        raw = memoryview(meta.routed_experts)  # a JSON string with its quotes, null, or nothing
        routing = None
        # Rows of tokens that were not delivered would be too many rows.
        if raw.nbytes and raw[0] == ord('"') and not self.cut_short and not omits_rows:
            routing = self._payload(payload or raw[1:-1], parse_version(self._engine_id, meta.weight_version))
        return Finish(
            reason=cast(Literal["stop", "length", "abort"], finish.type),
            version_spans=() if omits_rows and meta.weight_version is None else self._spans(meta),
            routing=routing,
            scores=None if finish.type == "abort" else self._scores(meta),
            cached_tokens=meta.cached_tokens,
            retractions=tuple(self._retractions),
        )

    def _scores(self, meta: _Meta) -> Float32Array | None:
        """Return the log-probs of the prompt that were asked for, checked against its tokens."""
        begin = self._request.score_from
        if begin is None:
            return None
        wanted = self._request.input_ids[begin:].tolist()
        entries = meta.input_token_logprobs[-len(wanted) :]
        # SGLang reports 0 for the last id of the vocabulary (`_process_input_token_logprobs` in
        # managers/scheduler_components/logprob_result_processor.py), with its own log-prob.
        reported = [token_id if token_id < self._vocab_size - 1 else 0 for token_id in wanted]
        if [token_id for _, token_id, _ in entries] != reported:
            raise EngineError(
                f"{self._engine_id} sent log-probs of {len(meta.input_token_logprobs)} tokens of a prompt, "
                f"not those of its last {len(wanted)} tokens"
            )
        scores = np.array([math.nan if value is None else value for value, *_ in entries], np.float32)
        if not (scores <= _LOG_PROB_ROUNDING).all():
            raise EngineError(f"{self._engine_id} sent a log-prob of a prompt that is missing or above 0")
        return scores

    def _payload(self, text: RoutingText | memoryview, version: int) -> RoutingPayload:
        data, fault = memoryview(b""), None
        if isinstance(text, memoryview):
            data = text
        else:
            try:
                data = text.finish_rows(self.num_rows).data
            except AlignmentError as e:
                fault = str(e)
        return RoutingPayload(
            data=data,
            num_rows=self.num_rows,
            weight_version=version,
            start=self._request.routing_start,
            fault=fault,
        )

    def _spans(self, meta: _Meta) -> tuple[VersionSpan, ...]:
        if not self.delivered:
            return ()
        reported = meta.weight_versions
        if not reported:
            version = parse_version(self._engine_id, meta.weight_version)
            if len(self._versions) > 1:
                raise VersionMismatch(
                    f"{self._engine_id} reports {len(self._versions)} weight versions during the call "
                    f"{self._request.request_id}, at last {version}, and not which tokens are of which"
                )
            return (VersionSpan(start=0, end=self.delivered, weight_version=version),)
        spans = tuple(
            VersionSpan(
                start=span.start,
                end=min(span.end, self.delivered),
                weight_version=parse_version(self._engine_id, span.version),
            )
            for span in reported
            if span.start < min(span.end, self.delivered)
        )
        if not check_partition(spans, self.delivered):
            raise EngineError(
                f"{self._engine_id} reports versions {reported} for {self.delivered} sampled tokens"
            )
        return spans

    def _refusal(self, refusal: _Refusal) -> EngineError | RequestRefused:
        """Return the error for a refusal within the stream, which is SGLang's own and has no Retry-After.

        SGLang's scheduler says 503 when its queue is full, or a request waited there for too long.
        """
        code = refusal.code
        message = f"{self._engine_id} refused the call {self._request.request_id}: {refusal.message}"
        # Also one for its length, which the client has checked: the server itself may be wrong.
        if code in (400, 413, 422):
            return RequestRefused(message)
        return EngineBusy(message) if code in (429, 503) else CallLost(message)
