"""A simulated engine in which faults are injected one by one: `engine.faults.append(Fault("die"))`."""

from __future__ import annotations

import asyncio
import math
from typing import Any, Literal, get_args

import msgspec
import numpy as np

from async_rl.engine_protocol import Chunk, Finish, GenerateRequest, WeightUpdate
from async_rl.engines.simulated import SimulatedCall, SimulatedEngine
from async_rl.errors import EngineBusy, EngineError, EngineTimeout, VersionMismatch, WeightSyncError
from async_rl.types import SamplingMask

CallFault = Literal[
    "die", "hang", "wrong_rows", "wrong_mask", "nan", "lose", "repeat", "busy", "retract", "skewed_versions"
]
UpdateFault = Literal["refuse_flush", "partial_update"]
MemoryFault = Literal["refuse_memory", "hang_memory"]
_CALL_FAULTS = frozenset(get_args(CallFault))
_UPDATE_FAULTS = frozenset(get_args(UpdateFault))
_MEMORY_FAULTS = frozenset(get_args(MemoryFault))


class Fault(msgspec.Struct, frozen=True):
    """A fault that happens once, in the next call or update that it applies to.

    die: the engine dies, and all its connections are lost; it stays dead until `restart`.
    hang: the call goes silent, and ends in a timeout after `stall_s`.
    wrong_rows: the routing has one row too many.
    wrong_mask: a sampling mask does not keep its token.
    nan: a log-prob is not a number.
    lose: a chunk is never delivered, and what comes after it does not fit the engine's count.
    repeat: a chunk comes twice, and once too often for the engine's count.
    busy: the call is refused because the engine has too many.
    skewed_versions: its events report two weight versions, and nothing says where they change.
    retract: the engine takes the memory of the call for others, and prefills it again.
    refuse_flush: an update loads the weights and is refused the flush at first.
    partial_update: an update fails halfway; the engine still reports the old version.
    refuse_memory: device memory is released or taken, and the answer is an error.
    hang_memory: the same, and there is no answer.
    """

    kind: CallFault | UpdateFault | MemoryFault
    after_tokens: int = 1
    """Tokens of the call that are delivered before the fault."""


class _BreakableCall(SimulatedCall):
    """A call with a fault, or None."""

    def __init__(self, request: GenerateRequest, fault: Fault | None) -> None:
        super().__init__(request)
        self.fault = fault
        self.fault_done = False


class BreakableEngine(SimulatedEngine):
    """A simulated engine whose calls, updates and changes of memory fail as `faults` says."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        """Start idle and without faults; the arguments are those of `SimulatedEngine`."""
        super().__init__(*arguments, **named)
        self.faults: list[Fault] = []
        """Faults that have not happened yet, in order."""

    def _new_call(self, request: GenerateRequest) -> SimulatedCall:
        fault = self._next_fault(_CALL_FAULTS if request.return_mask else _CALL_FAULTS - {"wrong_mask"})
        if fault is not None and fault.kind == "busy":
            raise EngineBusy(f"{self._engine_id} has too many calls")
        return _BreakableCall(request, fault)

    async def _deliver(self, call: SimulatedCall, chunk: Chunk) -> tuple[Chunk, ...]:
        """Apply the call's fault when it is due.

        The client of a real server counts tokens: it accepts no token twice, and none after a gap.
        """
        assert isinstance(call, _BreakableCall)
        if call.fault_done and call.fault is not None and call.fault.kind == "lose":
            raise EngineError(
                f"{self._engine_id} counts {call.num_sampled} tokens of the call {call.request.request_id}, "
                f"but {call.num_sampled - 2} were delivered and one came"
            )
        if call.fault is None or call.num_sampled <= call.fault.after_tokens or call.fault_done:
            return (chunk,)
        call.fault_done = True
        match call.fault.kind:
            case "die":
                self.die()
                call.check_alive()
            case "hang":
                if await call.sleep(self._config.stall_s):
                    raise EngineTimeout(
                        f"{self._engine_id} was silent for {self._config.stall_s} s in the call "
                        f"{call.request.request_id} after {call.num_sampled - 1} tokens"
                    )
            case "nan":
                log_probs = [*chunk.log_probs[:-1].tolist(), math.nan]
                return (Chunk.of(chunk.token_ids.tolist(), log_probs, chunk.mask),)
            case "wrong_mask":
                if chunk.mask is not None:
                    others = [[(token + 1) % 256] for token in chunk.token_ids.tolist()]
                    return (msgspec.structs.replace(chunk, mask=SamplingMask.of(others)),)
            case "repeat":
                return (chunk,)
            case "lose":
                return ()
            case "retract" if call.has_slot and not call.is_over:
                call.lose_memory()
                self._running.remove(call)
                self._queue.append(call)
                self._fill_slots()
        return (chunk,)

    def _deliver_finish(self, call: SimulatedCall, finish: Finish) -> Finish:
        assert isinstance(call, _BreakableCall)
        kind = None if call.fault is None else call.fault.kind
        if kind == "skewed_versions" and finish.version_spans:
            raise VersionMismatch(  # as the client of a real server
                f"{self._engine_id} reports 2 weight versions during the call {call.request.request_id}, at "
                f"last {self._version}, and not which tokens are of which"
            )
        if kind == "wrong_rows" and finish.routing is not None:
            fed = np.frombuffer(finish.routing.data, np.int32).reshape(2, -1)
            data = np.concatenate([fed, fed[:, -1:]], axis=1).tobytes()
            return msgspec.structs.replace(finish, routing=msgspec.structs.replace(finish.routing, data=data))
        return finish

    async def _change_memory(self) -> None:
        fault = self._next_fault(_MEMORY_FAULTS)
        await super()._change_memory()
        if fault is not None and fault.kind == "hang_memory":
            await asyncio.Future()
        if fault is not None:
            raise WeightSyncError(f"{self._engine_id} refused to change its memory")

    async def _load_weights(self, update: WeightUpdate, *, flush: bool, deaths: int) -> None:
        fault = self._next_fault(_UPDATE_FAULTS)
        if fault is not None and fault.kind == "partial_update":
            await asyncio.sleep(self._update_s)
            self._check_alive(deaths)
            raise WeightSyncError(f"{self._engine_id} failed halfway to version {update.weight_version}")
        await super()._load_weights(update, flush=flush, deaths=deaths)
        if fault is not None and flush:
            await asyncio.sleep(self._config.decode_step_s)  # refused once; the second time it goes through

    def _next_fault(self, kinds: frozenset[str]) -> Fault | None:
        for index, fault in enumerate(self.faults):
            if fault.kind in kinds:
                return self.faults.pop(index)
        return None
