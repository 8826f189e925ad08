"""Simulated engines with the faults of real ones, behind a network that delays and loses connections.

The network is the client's side of a call: what the engine sends arrives later, or the connection ends though
the engine exists. An engine that is frozen keeps its connections and says nothing until it thaws or is
restarted, as a stopped process does.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final, NoReturn, cast, get_args

import msgspec

from async_rl.config import SimulatedEngines
from async_rl.data.chat_format import ChatFormat
from async_rl.engine_protocol import (
    AdapterUpdate,
    Chunk,
    DiskUpdate,
    DistributedUpdate,
    Engine,
    EngineHealth,
    Finish,
    GenerateRequest,
    GroupInvite,
    InterruptMode,
    MemoryPart,
    PayloadProgress,
    TensorUpdate,
    WeightUpdate,
)
from async_rl.engines.control_requests import wait_out
from async_rl.engines.sglang.refusals import explain_refusal
from async_rl.engines.sglang.routing_payload import PIECE_BYTES, PayloadGate
from async_rl.engines.simulated import SimulatedCall
from async_rl.errors import (
    EngineError,
    EngineTimeout,
    EnvironmentNotReady,
    LocalShortage,
    VersionMismatch,
    WeightSyncError,
)
from async_rl.rollout.workers.messages import Link
from async_rl.rollout.workers.worker_backend import WorkerSpec
from async_rl.run.recovery import node_folder
from async_rl.store.frame_reader import FrameReader
from async_rl.trainer_protocol import Trainer
from async_rl.weights.delta import DeltaRefused
from async_rl.weights.delta_delivery import HostFolder
from verification.simulation.breakable_engine import (
    BreakableEngine,
    CallFault,
    Fault,
    MemoryFault,
    UpdateFault,
)
from verification.simulation.broadcasts import Broadcasts, Life
from verification.simulation.faults import ENGINE_FAULTS, FAULTS, WORKER_FAULTS, FaultKind
from verification.simulation.invariant_checker import InvariantChecker
from verification.simulation.scenario import FACTS, Injection, Scenario
from verification.simulation.simulated_models import SimulatedModel, WatchedProcesses
from verification.simulation.simulated_trainer import SimulatedTrainer
from verification.simulation.simulated_workers import (
    CUT_OFF_S,
    LateRequest,
    LinkFault,
    SimulatedNodes,
    SimulatedWorkers,
    exponential,
)
from verification.simulation.users import SimulatedChat

_MAX_REFUSED: Final = 3
"""Calls that an engine may refuse before it is quarantined, beside those that were sent to it at once."""

_BURSTS: Final = 4
"""How often a worker that cannot report gives calls to an engine that refuses them."""

_REFUSAL_S: Final = 0.1
"""An engine takes so long to refuse a request, so that attempts that fail by it do not use up all steps."""

_SLOW_PAYLOAD_S: Final = 40.0
_PIECE: Final = bytes(PIECE_BYTES)

_ABORT_AGAIN_S: Final = 0.02
"""Between two aborts while calls of rollout workers may be under way."""

_MAX_DELAY_S: Final = 15.0
"""How long the messages of a rollout worker are delayed at most: longer than its leases are valid."""

_MAX_ISOLATED_S: Final = 30.0
"""How long a rollout worker reaches no engine at most: longer than it may be silent."""

_MAX_LATE_S: Final = 30.0
"""How late a request is at most: longer than leases are valid."""

_CONTROL_S: Final = 2.0
"""A control request without an answer for so long is given up."""


class FaultyEngine(BreakableEngine):
    """See the module."""

    def __init__(
        self,
        index: int,
        scenario: Scenario,
        checker: InvariantChecker,
        broadcasts: Broadcasts,
        incarnation: int,
    ) -> None:
        """Start idle, at version 0.

        Args:
            index: Number among the engines.
            scenario: Speeds and sizes.
            checker: Who hears everything that is said.
            broadcasts: Where the trainer sends weights.
            incarnation: Number of the driver's incarnation, which draws other delays.
        """
        config = scenario.config.engine
        assert isinstance(config, SimulatedEngines)
        super().__init__(
            f"engine-{index}",
            config,
            seed=scenario.seed + index,
            facts=FACTS,
            update_s=scenario.speeds.update_s,
            chunk_tokens=scenario.speeds.chunk_tokens,
            keeps_weights=scenario.config.adapters is not None,
        )
        self._speed = config
        self._model_path = str(Path(scenario.config.model.path).absolute())
        self._checker = checker
        self._broadcasts = broadcasts
        self._latency_s = scenario.speeds.latency_s
        rollout = scenario.config.rollout
        self._max_open_calls = rollout.max_concurrent_trajectories * (1 + rollout.max_branches)
        self._max_open_calls += len(scenario.validation) * scenario.config.evaluation.samples
        self._delays = random.Random(f"network {scenario.seed} {incarnation} {index}")
        self._call_faults: list[FaultKind] = []
        self._update_faults_to_come: list[FaultKind] = []
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._gate = PayloadGate(self._engine_id, config.stall_s)
        self._payload_stop_s = 0.0
        """How long the payloads from the next one on stop in their middle."""
        self._sends_payloads = asyncio.Event()
        self._sends_payloads.set()
        self._sends_since_s = -math.inf
        self._slow_pieces = 0
        """How many pieces the next payload has, each of which takes `_piece_s`."""
        self._piece_s = config.stall_s / 3
        self._num_slow = 0
        self._last_piece_s = -math.inf
        self._streams = 0
        self._no_streams = asyncio.Event()
        self._no_streams.set()
        self._stopped = False
        """Whether it has confirmed that no call runs, and its weights may change."""
        self._remote_calls = 0
        self._verified: int | None = None
        self._verifies_sums = scenario.config.weights.verify == "checksum"
        self._is_distrusted = False
        """Whether a call has reported two versions, so that the driver drops all calls of the engine."""
        self._kept_version: int | None = None
        """What it really serves after an update that it has only pretended."""
        self._rollbacks = 0
        """How often trainers had gone back when its weights were published, `InvariantChecker.weights_of`."""
        self._refusals: set[FaultKind] = set()
        """Refusals that have not taken effect yet."""
        self._refused_status: int | None = None
        """What it answers to all calls, until it is restarted."""
        self._refused = 0
        self.refuses_requests = False
        """Whether it answers as if every request were wrong."""
        self.has_refused_last = False
        """Whether it has done so with its last call."""
        self.others_accept: Callable[[], bool] = lambda: False
        """Whether another engine could accept what it refuses as a wrong request."""
        self._max_streams: int | None = None
        """Above so many calls it answers that it is busy."""
        self._retry_after: str | None = None
        self._reachable = True
        """Whether the driver has descriptors for connections."""
        self.failing_restarts = 0
        self._refuses_for_s = 0.0
        """How long it refuses requests after its next update."""
        self._hold_s = 0.0
        """How much longer its next update takes."""

    @property
    def weight_version(self) -> int:
        """What it really serves."""
        return self._version if self._kept_version is None else self._kept_version

    @property
    def holds_memory(self) -> bool:
        """Whether its process is alive and holds anything."""
        return bool(self.held_memory)

    @property
    def held_memory(self) -> set[MemoryPart]:
        """What its process holds, if it is alive."""
        return set() if self._dead else set(get_args(MemoryPart)) - self.missing

    @property
    def num_streams(self) -> int:
        """Calls that the driver has open."""
        return self._streams

    # -- faults -------------------------------------------------------------------------------------------

    def inject(self, injection: Injection) -> None:
        """Let something go wrong, now or in the next call or update."""
        kind, later = injection.kind, asyncio.get_running_loop().call_later
        if FAULTS[kind].family == "refusal":
            self._refusals.add(kind)
        if kind in ("die", "die_unseen"):
            self.die()
        elif kind == "freeze":
            self._thawed.clear()
            later(10 ** (4 * injection.amount - 1), self._thawed.set)
        elif kind == "slow":
            slow_s = self._speed.decode_step_s * 20 + 0.05
            self._config = msgspec.structs.replace(self._speed, decode_step_s=slow_s)
            later(10 * injection.amount, setattr, self, "_config", self._speed)
        elif kind == "refuse_calls":
            self._refused_status = (401, 404, 500)[int(3 * injection.amount)]
        elif kind == "refuse_requests":
            self._refuse_requests(10 * injection.amount)
        elif kind == "refuse_first":
            self._refuses_for_s = 15 * injection.amount
        elif kind == "too_busy":
            self._max_streams, self._retry_after = int(4 * injection.amount), ("1", None)[injection.step % 2]
            later(10 ** (3 * injection.amount), setattr, self, "_max_streams", None)
        elif kind == "no_descriptors":
            self._reachable = False
            later(20 * injection.amount, setattr, self, "_reachable", True)
        elif kind == "fail_restarts":
            self.failing_restarts += 1 + int(3 * injection.amount)
        elif kind == "die_in_call":
            self.faults.append(Fault("die", after_tokens=int(8 * injection.amount)))
        elif kind in (
            "hang",
            "wrong_rows",
            "wrong_mask",
            "nan",
            "lose",
            "repeat",
            "retract",
            "skewed_versions",
        ):
            self.faults.append(Fault(cast(CallFault, kind), after_tokens=int(8 * injection.amount)))
        elif kind == "disconnect":
            self._call_faults.append(kind)
        elif kind == "stuck_payload":
            self._payload_stop_s = 10 ** (3 * injection.amount - 1)
        elif kind == "slow_payload":
            self._slow_pieces = 1 + int(_SLOW_PAYLOAD_S * injection.amount / self._piece_s)
        elif kind in ("refuse_flush", "partial_update", "refuse_memory", "hang_memory"):
            self.faults.append(Fault(cast(UpdateFault | MemoryFault, kind)))
        elif kind == "hold_all":
            self._hold_s = 15 * injection.amount
        elif kind in ("late_error", "no_op_update", "hang_update", "die_in_update"):
            self._update_faults_to_come.append(kind)
        elif kind == "lying_version":
            if self._verifies_sums:
                self._update_faults_to_come.append(kind)
        else:
            raise ValueError(f"{kind} is nothing that an engine does")

    def _refuse_requests(self, duration_s: float) -> None:
        self.refuses_requests = True
        asyncio.get_running_loop().call_later(duration_s, setattr, self, "refuses_requests", False)

    def die(self) -> None:
        """Implements `SimulatedEngine.die`."""
        super().die()
        self._thawed.set()
        self._send_payloads()

    def restart(self) -> None:
        """Implements `SimulatedEngine.restart`."""
        super().restart()
        self._rollbacks = 0
        self._stopped = False
        self._verified = self._refused_status = self._max_streams = self._kept_version = None
        self._refused = 0
        self.refuses_requests = self._is_distrusted = False

    # -- calls --------------------------------------------------------------------------------------------

    async def generate(
        self, request: GenerateRequest
    ) -> AsyncGenerator[Chunk | PayloadProgress | Finish, None]:
        """Implements `Engine.generate`."""
        # A call that was held during an update reaches the engine when that has died: nothing is served then.
        verified = self._version if self._dead else self._verified
        self._checker.call_begins(self._engine_id, request, self.weight_version, verified)
        if self._stopped:
            self._checker.fail(f"{self._engine_id} gets a call after it was interrupted")
        self._streams += 1
        self._no_streams.clear()
        breaks_after = self._delays.randrange(1, 9) if self._call_faults else 0
        if breaks_after:
            self._checker.met(self._call_faults.pop())
        chunks: list[Chunk] = []
        finish: Finish | None = None
        failure: EngineError | None = None
        try:
            await self._refuse_call()
            async with aclosing(super().generate(request)) as stream:
                async for event in stream:
                    await self._arrival()
                    if isinstance(event, Finish):
                        if event.routing is not None:
                            async with aclosing(self._receive_payload()) as pieces:
                                async for piece in pieces:
                                    yield piece
                        finish = event
                        break
                    assert isinstance(event, Chunk)
                    chunks.append(event)
                    yield event
                    if len(chunks) == breaks_after:
                        raise EngineError(f"{self._engine_id}: connection lost")
        except EngineError as error:
            failure = error
            self._is_distrusted |= isinstance(error, VersionMismatch)
            raise
        finally:
            if finish is None and self._is_distrusted:  # then nothing is kept
                chunks = []
            self._checker.call_ends(request, chunks, finish, failure)
            self._streams -= 1
            if not self._streams:
                self._no_streams.set()
        assert finish is not None
        yield finish

    @contextmanager
    def remote_call(self) -> Iterator[None]:
        """Implements `Engine.remote_call`: the request may arrive later than it was announced."""
        self._remote_calls += 1
        try:
            yield
        finally:
            self._remote_calls -= 1

    async def _refuse_call(self) -> None:
        """Answer a call with a status, as a proxy or a server that was started otherwise does."""
        self._check_reachable()
        now = datetime.fromtimestamp(0, UTC)
        if self._refused_status is not None:
            self._meet("refuse_calls")
            self._refused += 1
            # What a worker has reported may be lost with its link. One that cannot report gives the engine
            # calls again after 0.25 s, 0.5 s and so on, until its grants expire.
            num_losses = sum(self._checker.met_faults[kind] for kind in WORKER_FAULTS)
            if self._refused > _MAX_REFUSED + (1 + _BURSTS * num_losses) * self._max_open_calls:
                self._checker.fail(f"{self._engine_id} has refused {self._refused} calls, and is given more")
            body = b'{"object":"error","message":"Unauthorized"}'
            raise explain_refusal(self._engine_id, self._refused_status, None, body, now)
        if self.refuses_requests:
            self.has_refused_last = True
            if self.others_accept():
                self._checker.request_is_refused_needlessly()
            self._meet("refuse_requests")
            await asyncio.sleep(_REFUSAL_S)
            body = b'{"object":"error","message":"wrong request"}'
            raise explain_refusal(self._engine_id, 400, None, body, now)
        self.has_refused_last = False
        if self._max_streams is not None and self._streams > self._max_streams:
            self._meet("too_busy")
            raise explain_refusal(self._engine_id, 429, self._retry_after, b"", now)

    def _check_reachable(self) -> None:
        if not self._reachable:
            self._meet("no_descriptors")
            raise LocalShortage(f"no descriptor for a connection to {self._engine_id}")

    def _meet(self, kind: FaultKind) -> None:
        """Count a fault that lasts when it takes effect for the first time."""
        if kind in self._refusals:
            self._refusals.remove(kind)
            self._checker.met(kind)

    async def _arrival(self) -> None:
        """The way of an event to the client."""
        if self._latency_s and self._delays.random() < 0.5:
            await asyncio.sleep(self._delays.expovariate(1 / self._latency_s))
        if not self._thawed.is_set():
            deaths = self._deaths
            await self._thawed.wait()
            self._check_alive(deaths)

    async def _receive_payload(self) -> AsyncGenerator[PayloadProgress, None]:
        """The way of a payload to the client, which lets a few of each engine in at a time."""
        yield PayloadProgress()
        if self._payload_stop_s:
            asyncio.get_running_loop().call_later(self._payload_stop_s, self._send_payloads)
            self._payload_stop_s = 0.0
            self._sends_payloads.clear()
            self._checker.met("stuck_payload")
        now_s = asyncio.get_running_loop().time()
        # At the moment at which the payloads go on, those that waited still hold their permits.
        sends = self._sends_payloads.is_set() and not self._num_slow and now_s > self._sends_since_s
        if self._gate.is_full and sends:
            self._checker.fail(f"{self._engine_id} waits for the payloads of another engine")
        deaths = self._deaths
        async with self._gate.permit() as arrival:
            await arrival.read_piece(self._read_payload)
            num_pieces, self._slow_pieces = self._slow_pieces, 0
            if num_pieces:
                self._checker.met("slow_payload")
            self._num_slow += bool(num_pieces)
            try:
                for _ in range(num_pieces):
                    await arrival.read_piece(self._read_piece)
                    self._check_alive(deaths)
                    self._last_piece_s = asyncio.get_running_loop().time()
                    yield PayloadProgress()
            finally:
                self._num_slow -= bool(num_pieces)
                self._sends_since_s = asyncio.get_running_loop().time()
        self._check_alive(deaths)

    @property
    def moves_payload(self) -> bool:
        """Whether the last piece of a slow payload has just arrived, so that the next is not late."""
        next_s = self._last_piece_s + self._piece_s
        return self._thawed.is_set() and asyncio.get_running_loop().time() <= next_s

    async def _read_piece(self) -> bytes:
        await asyncio.sleep(self._piece_s)
        await self._thawed.wait()
        return _PIECE

    async def _read_payload(self) -> bytes:
        await self._sends_payloads.wait()
        return b""

    def _send_payloads(self) -> None:
        self._sends_payloads.set()
        self._sends_since_s = asyncio.get_running_loop().time()

    def _sample(self, call: SimulatedCall) -> tuple[int, float]:
        digest = call.digest
        token, log_prob = super()._sample(call)
        self._checker.says(digest, token, self._version, self._rollbacks, log_prob)
        return token, log_prob

    def _next_fault(self, kinds: frozenset[str]) -> Fault | None:
        fault = super()._next_fault(kinds)
        if fault is not None:
            self._checker.met("die_in_call" if fault.kind == "die" else fault.kind)
        return fault

    # -- control ------------------------------------------------------------------------------------------

    async def interrupt(self, mode: InterruptMode) -> None:
        """Implements `Engine.interrupt`."""
        await self._answering()
        await super().interrupt(mode)
        if mode == "abort":
            await self._no_streams.wait()
            while self._remote_calls:  # their requests may be under way, so the abort is repeated
                await asyncio.sleep(_ABORT_AGAIN_S)
                await super().interrupt(mode)
                await self._no_streams.wait()
            self._stopped = True

    async def resume_generation(self, mode: InterruptMode) -> None:
        """Implements `Engine.resume_generation`."""
        self._stopped = False
        await self._answering()
        await super().resume_generation(mode)

    async def join_weight_group(self, invite: GroupInvite) -> None:
        """Implements `Engine.join_weight_group`."""
        await self._answering()
        await super().join_weight_group(invite)
        deaths = self._deaths

        def life() -> Life:
            if self._dead or self._deaths != deaths:
                return "ended"
            return "runs" if self._thawed.is_set() else "stopped"

        await self._broadcasts.join(invite, self._engine_id, life)

    async def update_weights(self, update: WeightUpdate, *, flush: bool) -> None:
        """Implements `Engine.update_weights`."""
        await self._answering()
        self._verified = None
        deaths = self._deaths
        fault = self._update_faults_to_come.pop(0) if self._update_faults_to_come else None
        if fault is not None:
            self._checker.met(fault)
        if isinstance(update, DistributedUpdate):
            self._check_alive()
            weights = await self._broadcasts.receive(update.group_name, self._engine_id)
            self._check_alive(deaths)
        elif isinstance(update, TensorUpdate):
            weights = await self._load_buckets(update, deaths)
        else:
            weights = self._read_files(update)
        if self._hold_s:
            hold_s, self._hold_s = self._hold_s, 0.0
            self._checker.met("hold_all")
            await asyncio.sleep(hold_s)
            self._check_alive(deaths)
        if fault == "no_op_update":
            return
        if fault == "hang_update":
            await asyncio.Future()
        if fault == "die_in_update":
            self.die()
        kept = max(0, self.weight_version)  # before its first update it has the model's files, version 0
        await super().update_weights(update, flush=flush)
        # The first engine that keeps its weights is not noticed: nothing says yet which sums are right.
        keeps = fault == "lying_version" and self._checker.have_sums
        self._kept_version = kept if keeps else None
        if self._refuses_for_s:
            self._checker.met("refuse_first")
            self._refuse_requests(self._refuses_for_s)
            self._refuses_for_s = 0.0
        if isinstance(update, DiskUpdate | AdapterUpdate) and (later := self._read_files(update)) != weights:
            self._checker.fail(f"{self._engine_id} reads {weights}, then {later}")
        version, _, rollbacks = weights.partition(".")
        if version != str(update.weight_version):
            self._checker.fail(f"{self._engine_id} gets {version} as version {update.weight_version}")
        self._rollbacks = int(rollbacks or 0)
        self._checker.published(self._engine_id, update.weight_version)
        if fault == "late_error":
            raise WeightSyncError(f"{self._engine_id} has new weights, and fails all the same")

    async def _load_buckets(self, update: TensorUpdate, deaths: int) -> str:
        sent = set()
        async with aclosing(update.buckets()) as buckets:
            async for payloads in buckets:
                await asyncio.sleep(self._update_s / update.num_buckets)
                self._check_alive(deaths)
                sent.add(bytes(payloads[0]).decode())
        if len(sent) != 1:
            self._checker.fail(f"{self._engine_id} gets {sent} as version {update.weight_version}")
        return min(sent)

    def _read_files(self, update: DiskUpdate | AdapterUpdate) -> str:
        """Published files hold their version for as long as an engine reads them."""
        if update.path == self._model_path:
            return "0.0"
        path = Path(update.path) / "weights"
        return path.read_text() if path.exists() else "nothing"

    async def release_memory(self, parts: Sequence[MemoryPart]) -> None:
        """Implements `Engine.release_memory`."""
        await self._answering()
        if self._calls:  # the gate is for requests that the driver cannot know of
            self._checker.fail(f"{self._engine_id} releases its memory, and {len(self._calls)} calls run")
        await super().release_memory(parts)

    async def resume_memory(self, parts: Sequence[MemoryPart]) -> None:
        """Implements `Engine.resume_memory`."""
        await self._answering()
        await super().resume_memory(parts)

    def _die_with(self, what: str) -> NoReturn:
        self._checker.fail(f"{self._engine_id} dies of what it was asked: {what}")
        super()._die_with(what)

    async def checksums(self) -> tuple[dict[str, str], ...]:
        """Implements `Engine.checksums`: of the weights that it really has."""
        if self._kept_version is not None:
            return ({"weights": str(self._kept_version)},)
        self._checker.have_sums = True
        return await super().checksums()

    async def health(self) -> EngineHealth:
        """Implements `Engine.health`."""
        self._check_reachable()
        await self._answering()
        health = await super().health()
        self._verified, self._stopped = health.weight_version, False
        return health

    async def _answering(self) -> None:
        await wait_out(self._connect)
        if self._latency_s:
            await asyncio.sleep(self._delays.expovariate(1 / self._latency_s))
        try:
            async with asyncio.timeout(_CONTROL_S):
                await self._thawed.wait()
        except TimeoutError as error:
            raise EngineTimeout(f"{self._engine_id} did not answer within {_CONTROL_S} s") from error

    async def _connect(self) -> None:
        self._check_reachable()


class SimulatedFolder(HostFolder):
    """A host's copy of the weights: a file that says which version it is of."""

    def __init__(self, engine_id: str, checker: InvariantChecker, seconds: float) -> None:
        self._engine_id = engine_id
        self._checker = checker
        self._seconds = seconds
        self._version: str | None = None

    async def copy_version(self, path: str, version: int) -> str:
        """Implements `WeightFolder.copy_version`."""
        await asyncio.sleep(self._seconds)
        source = Path(path) / "weights"
        found = source.read_text() if source.exists() else "nothing"
        if found.partition(".")[0] != str(version):
            self._checker.fail(f"the host of {self._engine_id} copies {found} as version {version}")
        return self._put(Path(path).parent, found)

    async def apply_delta(self, path: str) -> str:
        """Implements `WeightFolder.apply_delta`."""
        await asyncio.sleep(self._seconds)
        base, weights = Path(path).read_text().split()  # noqa: ASYNC240 - no time passes here
        if base != self._version:
            raise DeltaRefused(f"{path} is of version {base}, held is {self._version}", "base")
        return self._put(Path(path).parent, weights)

    def _put(self, directory: Path, weights: str) -> str:
        folder = directory / f"host of {self._engine_id}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "weights").write_text(weights)
        self._version = weights
        return str(folder)


class SimulatedCluster(WatchedProcesses):
    """Implements `async_rl.run.cluster.Cluster`."""

    weight_backend = "gloo"
    abortable_servers = True
    node = "driver"

    def __init__(
        self,
        scenario: Scenario,
        checker: InvariantChecker,
        incarnation: int,
        look: Callable[[], None],
        nodes: SimulatedNodes,
        run_dir: Path,
    ) -> None:
        """Make engines and a trainer for one incarnation of the driver."""
        self._nodes = nodes
        self._run_dir = run_dir
        broadcasts = Broadcasts()
        self._scenario = scenario
        self._checker = checker
        self.engines = [
            FaultyEngine(index, scenario, checker, broadcasts, incarnation)
            for index in range(scenario.config.engine.num_engines)
        ]
        self.trainer = SimulatedTrainer(scenario.config, scenario.speeds, checker, broadcasts, look)
        self.trainer.require_node = lambda node: nodes.require(node, asyncio.get_running_loop().time())
        delays = random.Random(f"workers {scenario.seed} {incarnation}")
        self._workers = SimulatedWorkers(
            scenario.seed,
            cast(ChatFormat, SimulatedChat()),
            self.engines,
            FACTS,
            delay_s=exponential(delays, scenario.speeds.latency_s),
            start_s=scenario.speeds.restart_s,
            nodes=nodes,
        )
        self._workers.on_call = checker.call_is_made
        config = scenario.config
        self.models = {
            name: SimulatedModel(name, config.of_model(name), FACTS, restart_s=scenario.speeds.restart_s)
            for name in config.models
        }
        self._workers.add_engines(engine for model in self.models.values() for engine in model.engines)
        self._folders: dict[str, SimulatedFolder] = {}

    def inject(self, injection: Injection) -> None:
        """Let something go wrong with an engine or the trainer."""
        kind = injection.kind
        loop, workers, met = asyncio.get_running_loop(), self._workers, partial(self._checker.met, kind)
        if kind == "kill_after_frame":
            workers.on_kill_after_frame = met
        elif kind == "worker_disk_full":
            workers.on_full_disk = met
            loop.call_later(100 * injection.amount, setattr, workers, "on_full_disk", None)
        elif kind == "node_disk_full":
            if node := workers.some_node(injection.engine):
                workers.full_nodes[node] = met
                loop.call_later(100 * injection.amount, workers.full_nodes.pop, node, None)
        elif kind == "late_request":
            workers.late_requests.append(LateRequest(_MAX_LATE_S * injection.amount, met))
        elif kind in get_args(LinkFault):
            workers.disturb(cast(LinkFault, kind), injection.engine, injection.amount, met)
        elif kind == "node_absent":
            if node := workers.some_node(injection.engine):
                self._nodes.stay_away(node, loop.time() + 100 * injection.amount)
                met()
        elif kind == "delay_worker":
            delay_s = _MAX_DELAY_S * injection.amount
            if workers.delay(injection.engine, delay_s):
                met()
                self._checker.worker_is_unaware(delay_s)
        elif kind == "bad_environment_worker":
            tasks = self._scenario.tasks
            # A silent task fails at once in any worker: of few tasks, both together may be most.
            if 10 * sum(task.metadata["trouble"] == "silent" for task in tasks) < len(tasks):
                workers.spoil_environment(injection.engine, 100 * injection.amount, met)
        elif kind == "wrong_message":
            if workers.send_wrong_message(injection.engine, injection.amount):
                met()
        elif kind == "isolate_worker":
            if workers.isolate(injection.engine, _MAX_ISOLATED_S * injection.amount):
                met()
        elif FAULTS[kind].family == "worker":
            ends: dict[FaultKind, Callable[[int], bool]] = {
                "kill_worker": workers.kill,
                "mute_worker": workers.mute,
                "deafen_worker": workers.deafen,
                "cut_off_worker": workers.cut_off,
                "node_lost": workers.lose_node,
                "node_wiped": partial(workers.lose_node, is_back=True),
            }
            with self.trainer.own_files():  # a lost node takes its frames with it, whatever the driver's disk
                happened = ends[kind](injection.engine)
            if happened:
                met()
                if kind in ("cut_off_worker", "deafen_worker"):
                    silent_s = self._scenario.config.rollout.worker_stall_s
                    self._checker.worker_is_unaware(2 * silent_s + CUT_OFF_S)
                if kind == "cut_off_worker":
                    self._checker.cut_off_folders |= workers.cut_off_folders
        elif FAULTS[kind].family == "model":
            self._inject_into_model(injection)
        elif kind in ENGINE_FAULTS:
            engine = self.engines[injection.engine % len(self.engines)]
            for each in self.engines if kind in ("no_descriptors", "hold_all") else [engine]:
                each.inject(injection)
            if kind == "refuse_first":
                for each in self.engines:
                    if each is not engine:
                        each.inject(msgspec.structs.replace(injection, kind="hold_all"))
            if FAULTS[kind].family == "engine":
                met()
            if kind == "die":
                self.note_death(engine.engine_id)
        else:
            self.trainer.faults.append(kind)

    def _inject_into_model(self, injection: Injection) -> None:
        kind, models = injection.kind, list(self.models.values())
        model = models[injection.engine % len(models)]
        self._checker.met(kind)
        if kind == "busy_model":
            model.engines[injection.engine % len(model.engines)].faults.append(Fault("busy"))
            return
        if kind == "fail_model":
            model.failing_restarts = 1 + int(3 * injection.amount)
        model.kill_engine(injection.engine, noticed=kind != "lose_model")

    def engines_of(self, model: str) -> SimulatedModel:
        """Implements `Cluster.engines_of`."""
        return self.models[model]

    def look_at_devices(self) -> None:
        """Check that one side holds memory on shared devices, or both sides weights and nothing else."""
        if not self._scenario.config.placement.shared or self.trainer.holds == "nothing":
            return
        allowed: set[MemoryPart] = {"weights"} if self.trainer.holds == "weights" else set()
        holding = [e.engine_id for e in self.engines if e.held_memory - allowed]
        if holding:
            self._checker.fail(f"out of memory: the trainer holds {self.trainer.holds}, {holding} hold more")

    def ranks_beside(self, engine_id: str) -> tuple[int, ...]:
        """See `WeightRoutes.ranks_beside`."""
        return ()

    async def start_engines(self) -> list[Engine]:
        """Implements `Cluster.start_engines`."""
        await asyncio.sleep(self._scenario.speeds.restart_s)
        return list(self.engines)

    async def place_trainer(self) -> None:
        """Implements `Cluster.place_trainer`."""

    async def start_trainer(self) -> Trainer:
        """Implements `Cluster.start_trainer`."""
        await asyncio.sleep(self._scenario.speeds.restart_s)
        return self.trainer

    def connect_engine(self, engine_id: str, url: str) -> Engine:
        """See `Cluster.connect_engine`. No server joins: scenarios have no `engine.urls_file`."""
        raise AssertionError(f"{engine_id} at {url} joins")

    async def disconnect_engine(self, engine_id: str) -> None:
        """Implements `Cluster.disconnect_engine`."""

    async def stop_engine(self, engine_id: str) -> None:
        """Implements `Cluster.stop_engine`."""
        next(engine for engine in self.engines if engine.engine_id == engine_id).die()

    async def restart_engine(self, engine_id: str) -> None:
        """Implements `Cluster.restart_engine`."""
        engine = next(engine for engine in self.engines if engine.engine_id == engine_id)
        engine.die()
        self._folders.pop(engine_id, None)
        await asyncio.sleep(self._scenario.speeds.restart_s)
        if engine.failing_restarts:
            engine.failing_restarts -= 1
            raise EnvironmentNotReady(f"{engine_id} does not come up")
        engine.restart()

    def other_nodes(self) -> Collection[str]:
        """Implements `Cluster.other_nodes`."""
        return self._nodes.names

    def open_frame_reader(self, node: str) -> FrameReader:
        """Implements `Cluster.open_frame_reader`."""
        spool_dir = self._scenario.config.queue.spool_dir
        directory = None if spool_dir is None else node_folder(spool_dir, self._run_dir) / node
        return self._nodes.open_reader(node, directory, asyncio.get_running_loop().time)

    def rollout_worker(self, spec: WorkerSpec) -> AbstractAsyncContextManager[Link]:
        """Implements `Cluster.rollout_worker`."""
        return self._workers.open(spec)

    def local_folder(self, engine_id: str) -> SimulatedFolder:
        """See `Cluster.local_folder`. It is lost when the engine is restarted."""
        return self._folders.setdefault(
            engine_id, SimulatedFolder(engine_id, self._checker, self._scenario.speeds.update_s / 2)
        )

    async def open_port(self, rank: int) -> tuple[str, int]:
        """Implements `Cluster.open_port`."""
        return "127.0.0.1", 0
