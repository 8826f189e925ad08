"""One call of a further model's engines, as its teacher or judge makes it."""

from __future__ import annotations

from contextlib import aclosing

from msgspec.structs import replace

from async_rl.engine_protocol import Chunk, Finish, GenerateRequest
from async_rl.errors import EngineError, RequestRefused, RolloutError, VersionMismatch
from async_rl.rollout.session.context import SessionContext


async def call_model(
    context: SessionContext, model: str, request: GenerateRequest
) -> tuple[list[int], Finish | None]:
    """Make one call of an engine of a model in `models`.

    Args:
        context: Has the engines.
        model: The model.
        request: The call; its id is made here.

    Returns:
        The sampled tokens and the end of the call. There is none if the engine failed, which is counted: the
        caller calls again, and waits until an engine serves.

    Raises:
        RolloutError: The model refuses the request, which is too long, for example.
    """
    key, calls, sampled = context.new_id(), context.models[model], list[int]()
    finish: Finish | None = None
    num_tokens = len(request.input_ids)
    async with calls.lease(key, num_tokens + request.max_new_tokens, prompt=num_tokens) as lease:
        request = replace(request, request_id=f"{key}-{lease.epoch_name}")
        try:
            async with aclosing(lease.generate(request)) as stream:
                async for event in stream:
                    if isinstance(event, Chunk):
                        sampled += event.token_ids.tolist()
                    elif isinstance(event, Finish):
                        finish = event
        except RequestRefused as error:
            raise RolloutError(f"the model {model!r} refuses what it is asked: {error}") from error
        except EngineError as error:
            if isinstance(error, VersionMismatch):  # the tokens are another model's
                sampled.clear()
            context.metrics.model_retries_total.labels(model).inc()
        finally:
            calls.forget_trajectory(key)
    return sampled, finish
