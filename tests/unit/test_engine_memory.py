"""What an engine survives of a hand-over, and that nothing else can be asked of it."""

from __future__ import annotations

import asyncio

import pytest

from async_rl.config import SimulatedEngines
from async_rl.engine_protocol import AdapterUpdate, DiskUpdate, MemoryPart
from async_rl.engines.device_memory import EmptyEngine, stop_engine
from async_rl.errors import EngineBusy, EngineError, InvariantError, WeightSyncError
from async_rl.types import VersionSpan
from tests.support.engine_calls import Call, call, request
from verification.simulation.breakable_engine import BreakableEngine, Fault

ALL: tuple[MemoryPart, ...] = ("kv_cache", "cuda_graph", "weights")


def engine(*, keeps_weights: bool = False, **settings: float) -> BreakableEngine:
    config = SimulatedEngines(**settings)
    return BreakableEngine("engine-0", config, seed=1, update_s=1.0, keeps_weights=keeps_weights)


async def emptied(subject: BreakableEngine, **keeps: bool) -> EmptyEngine:
    return await (await stop_engine(subject, subject.interrupt)).release_all(**keeps)


async def test_an_engine_answers_under_its_new_adapter_when_it_kept_the_models_weights() -> None:
    subject = engine(keeps_weights=True)
    empty = await emptied(subject, keeps_weights=True)
    again = await (await empty.resume_weights()).release_weights()
    loadable = await again.resume_weights()
    await subject.update_weights(AdapterUpdate(weight_version=3, path=""), flush=True)
    await loadable.resume_rest()
    ended = await call(subject, [5, 6, 7], 4)
    assert {span.weight_version for span in ended.finish.version_spans} == {3}
    assert ended.finish.routing is not None
    assert set(ended.trace.spans) == {VersionSpan(start=0, end=6, weight_version=3)}


@pytest.mark.parametrize("twice", [False, True])
async def test_an_engine_is_refused_an_adapter_when_it_has_lost_the_models_weights(twice: bool) -> None:
    """It would load the adapter, report its version, and compute with what the device happens to hold."""
    subject = engine(keeps_weights=twice)
    empty = await emptied(subject, keeps_weights=True)
    if twice:
        empty = await (await empty.resume_weights()).release_weights()
        subject.keeps_weights = False
    with pytest.raises(WeightSyncError, match="engine-0 does not have the model's weights that it had"):
        await empty.resume_weights()


async def test_nothing_is_sent_when_an_object_is_used_a_second_time() -> None:
    subject = engine()
    stopped = await stop_engine(subject, subject.interrupt)
    empty = await stopped.release_all()
    loadable = await empty.resume_weights()
    await loadable.resume_rest()
    for again in (stopped.release_all, empty.resume_weights, loadable.resume_rest, loadable.release_weights):
        with pytest.raises(InvariantError, match="a second time"):
            await again()
    assert (await call(subject, [5, 6, 7], 2)).token_ids


@pytest.mark.parametrize("cut", ["refused", "cancelled"])
async def test_no_attempt_can_be_repeated_after_it_has_failed(cut: str) -> None:
    subject = engine()
    stopped = await stop_engine(subject, subject.interrupt)
    if cut == "refused":
        subject.faults.append(Fault("refuse_memory"))
        with pytest.raises(EngineError, match="refused"):
            await stopped.release_all()
    else:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await stopped.release_all()
    with pytest.raises(InvariantError, match="a second time"):
        await stopped.release_all()


async def test_a_late_call_is_refused_from_the_beginning_of_a_release_to_the_last_resume() -> None:
    subject = engine(mean_new_tokens=1e6)
    running = Call(subject, request([5, 6, 7], 1000))
    async with asyncio.TaskGroup() as group:
        late = group.create_task(running.run())  # it arrived after the engine was interrupted
        await running.has_tokens(1)
        releasing = group.create_task(subject.release_memory(ALL))
        await asyncio.sleep(0)
        with pytest.raises(EngineBusy, match="about to"):
            await call(subject, [5, 6, 7], 3)
        await releasing
    assert late.result().finish.reason == "abort"
    await subject.resume_memory(("weights",))
    with pytest.raises(EngineBusy, match="has released"):
        await call(subject, [5, 6, 7], 3)
    await subject.resume_memory(("kv_cache", "cuda_graph"))
    assert (await call(subject, [5, 6, 7], 3)).token_ids


async def test_the_simulated_engine_dies_when_it_is_asked_what_kills_a_server() -> None:
    for wrong in (
        lambda subject: subject.release_memory(("weights",)),
        lambda subject: subject.update_weights(DiskUpdate(weight_version=1, path=""), flush=True),
    ):
        subject = engine()
        await subject.release_memory(ALL)
        with pytest.raises((EngineError, ExceptionGroup)):
            await wrong(subject)
        with pytest.raises(EngineError, match="cannot be reached"):
            await subject.health()
