"""Reads what an engine may answer to a generate call as the client does, and checks what must always hold."""

from __future__ import annotations

import math
import time

import msgspec
import numpy as np

from async_rl.engine_protocol import GenerateRequest, SamplingParams
from async_rl.engines.sglang.generate_call import CallAccount, EventReader, EventTooLong
from async_rl.engines.sglang.routing_payload import RoutingText, RoutingWire
from async_rl.errors import EngineError, RolloutError
from tests.support.fake_sglang import event, facts, finish

FACTS = facts()
REQUEST = GenerateRequest(
    request_id="0" * 32,
    input_ids=np.array([5, 6, 7], np.int32),
    max_new_tokens=8,
    sampling=SamplingParams(temperature=1.0, stop_token_ids=(2,)),
    return_routing=True,
)
MASKED = msgspec.structs.replace(REQUEST, sampling=SamplingParams(top_k=4), return_mask=True)
"""Asks for sampling masks; for streams that have some."""

VALID = [
    event([10, 11], 2) + event([2], 3, finish_reason=finish("stop", matched=2), routed_experts="A" * 160),
    event([10], 1, finish_reason=finish("abort"), weight_versions=[{"version": "0", "start": 0, "end": 1}]),
    event([], 0, finish_reason=finish("abort", status_code=503, message="full")),
    event([10], 1, log_probs=[None]) + b": comment\n\n" + b'data: {"error":{"message":"no","code":400}}\n\n',
    event([7], 1, output_token_sampling_mask=[[7, 8]], output_token_sampling_logprobs=[-0.5])
    + event(
        [9, 2],
        3,
        finish_reason=finish("stop", matched=2),
        output_token_sampling_mask=[[9], [1, 2, 299]],
        output_token_sampling_logprobs=[0.0, -1.5],
    ),
    event([10], 1, finish_reason=finish("stop"), routed_experts="A" * 90_000) + b"data: [DONE]\n\n",
]
"""Streams to mutate."""


class SlowRead(AssertionError):
    """A read blocked the event loop."""


def read_stream(data: bytes, read_bytes: int, max_step_s: float = math.inf) -> int:
    """Read a stream in pieces, and return the number of tokens it delivered before it ended or failed.

    Args:
        data: What the engine sends.
        read_bytes: How much of it one network read has.
        max_step_s: Longest processor time of the event loop for one read.

    Raises:
        AssertionError: Something that holds of each call was violated.
        SlowRead: A read took longer than `max_step_s`.
    """
    request = MASKED if b"sampling_mask" in data else REQUEST
    call = CallAccount("engine-0", request, FACTS.vocab_size)
    wire = RoutingWire(facts=FACTS)
    reader = EventReader(lambda: RoutingText(wire, call.num_rows, call.max_rows), call.max_event_bytes)
    tokens = 0
    try:
        for begin in range(0, len(data), read_bytes):
            begin_s = time.thread_time()
            for document, payload in reader.feed(data[begin : begin + read_bytes]):
                if document == b"[DONE]":
                    continue
                call.read_event(document, payload)
                chunk = call.take_chunk()
                if chunk is not None:
                    tokens += len(chunk.token_ids)
                    assert all(0 <= token < FACTS.vocab_size for token in chunk.token_ids)
                    assert all(math.isnan(p) or -math.inf < p < 0.01 for p in chunk.log_probs)
                    assert tokens <= REQUEST.max_new_tokens
                    assert (chunk.mask is not None) == request.return_mask
                    if chunk.mask is not None:
                        assert len(chunk.mask) == len(chunk.token_ids)
                        assert chunk.mask.token_ids.max(initial=0) < FACTS.vocab_size
                        chunk.mask.keeps(chunk.token_ids)
            call.ends_without_rows(reader.head)
            if reader.payload is not None and reader.payload.is_too_long:
                break
            if time.thread_time() - begin_s >= max_step_s:
                raise SlowRead(f"a read took more than {max_step_s} s of the event loop")
    except (EngineError, RolloutError, EventTooLong):
        pass  # documented
    return tokens
