"""An engine called by a rollout worker: grants over a real link, requests by a client of the worker's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager

from async_rl.engine_protocol import (
    Chunk,
    Engine,
    Finish,
    GenerateRequest,
    InterruptMode,
    MemoryPart,
    WeightUpdate,
)
from async_rl.engines.pool import EnginePool
from async_rl.observability.metrics import Metrics
from async_rl.rollout.workers.link import connect_link, listen
from async_rl.rollout.workers.messages import (
    EnginesReleased,
    GrantEngines,
    Heartbeat,
    Link,
    Renewed,
    RevokeEngines,
)
from async_rl.rollout.workers.worker import TICK_S
from async_rl.rollout.workers.worker_engines import WorkerEngines
from async_rl.rollout.workers.worker_grants import WorkerGrants
from async_rl.runtime.supervision import Nursery


class EngineThroughWorker:
    """Implements `Engine`: a worker makes the calls, and the driver's pool interrupts the engine.

    Calls take grants; `interrupt` is `EnginePool.interrupt_engine`; the engine serves again when it resumes.
    """

    def __init__(self, engine: Engine, client: Engine, pool: EnginePool, worker: WorkerEngines) -> None:
        self.engine = engine
        """The driver's client."""
        self.client = client
        """The worker's."""
        self.pool = pool
        self.worker = worker
        self.calls = worker.models[""].dispatcher
        self.driver_answers = True
        """Whether the driver answers heartbeats, and so renews the grants."""
        self._paused = False
        self.engine_id = engine.engine_id
        self.decode_routing = client.decode_routing
        self.health, self.checksums = engine.health, engine.checksums

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk | Finish, None]:
        prompt = len(request.input_ids)
        async with self.calls.lease("0" * 32, prompt + request.max_new_tokens, prompt=prompt) as lease:
            async with aclosing(lease.generate(request)) as stream:
                async for event in stream:
                    yield event

    async def interrupt(self, mode: InterruptMode) -> None:
        self.pool.hold_engine(self.engine_id)
        await self.pool.interrupt_engine(self.engine, mode)
        self._paused |= mode != "abort"
        if not self._paused:
            await self._serve()

    async def resume_generation(self, mode: InterruptMode) -> None:
        await self.engine.resume_generation(mode)
        self._paused = False
        await self._serve(keeps_cache=mode == "in_place")

    async def wait_ready(self) -> None:
        await self.engine.wait_ready()
        self._paused = False
        await self._serve()

    async def update_weights(self, update: WeightUpdate, *, flush: bool) -> None:
        await self.engine.update_weights(update, flush=flush)
        if not self._paused:
            self.pool.hold_engine(self.engine_id)
            await self._serve(keeps_cache=not flush)

    async def release_memory(self, parts: Sequence[MemoryPart]) -> None:
        await self.engine.release_memory(parts)

    async def resume_memory(self, parts: Sequence[MemoryPart]) -> None:
        await self.engine.resume_memory(parts)

    async def _serve(self, *, keeps_cache: bool = False) -> None:
        health = await self.engine.health()
        self.pool.serve_engine(self.engine_id, health.weight_version, keeps_cache=keeps_cache)

    async def close(self) -> None:
        await self.client.close()
        await self.engine.close()


@asynccontextmanager
async def through_worker(engine: Engine, client: Engine) -> AsyncIterator[EngineThroughWorker]:
    """Make calls to an engine through a worker, whose client of it is given, while the block runs."""
    clock = asyncio.get_running_loop().time
    metrics = Metrics()
    pool = EnginePool(metrics, clock)
    pool.add_engine(engine)
    async with listen("127.0.0.1") as listener, Nursery() as tasks:
        connecting = tasks.start_task("worker", connect_link("127.0.0.1", listener.port, listener.key))
        ours = await listener.accept_link()
        theirs = await connecting
        grants = WorkerGrants(
            "rollout-worker-0",
            {"": pool},
            ours.post,
            clock=clock,
            on_revoke=lambda version: None,
            worker_stall_s=30.0,
        )
        worker = WorkerEngines(theirs.post, lambda *of: client, {"": metrics}, clock=clock)
        sent: dict[int, float] = {}
        tasks.start_task("checks", grants.checks.check_engines())
        tasks.start_task("worker's end", _receive_in_worker(theirs, worker, sent))
        tasks.start_task("heartbeats", _send_heartbeats(theirs, worker, sent))
        subject = EngineThroughWorker(engine, client, pool, worker)
        tasks.start_task("driver's end", _receive_in_driver(ours, grants, subject))
        await subject.wait_ready()
        yield subject
        tasks.cancel_tasks()
        ours.close()
        theirs.close()


async def _receive_in_driver(link: Link, grants: WorkerGrants, subject: EngineThroughWorker) -> None:
    while True:
        message = await link.receive()
        if isinstance(message, EnginesReleased):
            grants.record_release(message)
        elif isinstance(message, Heartbeat) and subject.driver_answers:
            grants.renew(message)


async def _send_heartbeats(link: Link, worker: WorkerEngines, sent: dict[int, float]) -> None:
    while True:
        sent[len(sent) + 1] = asyncio.get_running_loop().time()
        link.post(Heartbeat(number=len(sent), engines=worker.uses(), reports=worker.pop_reports()))
        await asyncio.sleep(TICK_S)


async def _receive_in_worker(link: Link, worker: WorkerEngines, sent: dict[int, float]) -> None:
    """Do what `RolloutWorker` does with messages that concern engines."""
    while True:
        match await link.receive():
            case GrantEngines() as granted:
                worker.grant(granted)
            case Renewed() as renewed:
                worker.renew(sent[renewed.number])
            case RevokeEngines() as revoke:
                worker.revoke(revoke)
