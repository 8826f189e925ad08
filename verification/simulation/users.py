"""What a user brings to a simulated run: a chat format of token ids, an agent loop, rewards.

All of it follows the script in the task's metadata, see `verification.simulation.scenario`.
"""

from __future__ import annotations

import asyncio
import os
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Final, cast

import numpy as np

from async_rl.errors import ConfigError, InvariantError
from async_rl.rollout.session.api import Session, Turn
from async_rl.runtime.supervision import Nursery
from async_rl.runtime.threads import call_in_thread
from async_rl.types import Completion, Int32Array, StopReason, Task
from verification.simulation.invariant_checker import AttemptLimit, group_score, reward_source

attempt_begins: ContextVar[Callable[[float], AttemptLimit]] = ContextVar("attempt_begins")
"""Told when the loop of a trajectory starts from its prompt, with its session's remaining seconds, in the
trajectory's task; returns its limit."""

attempt_cancelled: ContextVar[Callable[[AttemptLimit, float], None]] = ContextVar("attempt_cancelled")
"""Told when that loop is cancelled, with what the other returned and its session's remaining seconds."""

count_fault: ContextVar[Callable[[str], None]] = ContextVar("count_fault", default=lambda kind: None)
"""Called with a fault of the user's code at the moment it takes effect."""


_STOP_PAIRS: Final = tuple(f"{digit} 1" for digit in range(10))
"""Stop strings over two tokens: each fourth token ends the turn, unless it is the first one."""

_STRAGGLES_S: Final = 20.0
"""Longer than some limits of trajectories and stragglers, shorter than others."""


class SimulatedChat:
    """Token ids in words: `"17 23"` is two tokens. 2 ends a sequence, 4 a turn."""

    stop_token_ids = (2,)
    end_of_turn_id = 4
    end_of_turn_ids = (4,)

    def prompt_ids(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> Int32Array:
        """Implements `ChatFormat.prompt_ids`."""
        return _ids(messages)

    def append_ids(self, messages: Sequence[Mapping[str, Any]], *, after_length: bool = False) -> Int32Array:
        """Implements `ChatFormat.append_ids`."""
        ids = _ids(messages)
        return np.concatenate([np.full(1, self.end_of_turn_id, np.int32), ids]) if after_length else ids

    def decode(self, token_ids: Sequence[int] | Int32Array) -> str:
        """Implements `ChatFormat.decode`."""
        return " ".join(map(str, token_ids))

    def raw_text(self, token_ids: Sequence[int] | Int32Array) -> str:
        """Implements `ChatFormat.raw_text`."""
        return self.decode(token_ids)


def _ids(messages: Sequence[Mapping[str, Any]]) -> Int32Array:
    words: list[str] = []
    for message in messages:
        if not isinstance(message["content"], str):  # as templates of Qwen do
            raise ConfigError(f"the chat template cannot render the content {message['content']!r}")
        words += message["content"].split()
    return np.array([int(word) for word in words], np.int32)


def _stop_strings(task: Task) -> Sequence[str]:
    return _STOP_PAIRS if task.metadata["trouble"] == "split_stop" else ()


def _import_package() -> None:
    if bad_environment.get()():
        raise ImportError(MISSING_PACKAGE)


def _check_stop(turn: Turn, stop: Sequence[str]) -> None:
    """Check that a turn ends with the token that completes a stop string, however it was interrupted."""
    words = turn.text.split(" ")
    if any(each in " ".join(words[:-1]) for each in stop):
        raise InvariantError(f"the turn {turn.text} continues after one of the stop strings {stop}")
    if any(each in turn.text for each in stop):
        if turn.finish_reason != "stop":
            raise InvariantError(f"the turn {turn.text} ended by {turn.finish_reason} at a stop string")
        if turn.num_interruptions:
            count_fault.get()("split_stop")


bad_environment: ContextVar[Callable[[], bool]] = ContextVar("bad environment", default=lambda: False)
"""Whether the process of a loop lacks a package that it imports when it runs."""

MISSING_PACKAGE: Final = "No module named 'solver'"


class TurnsLoop:
    """As many turns as the script has, with a tool's result after each but the last."""

    async def run(self, task: Task, session: Session) -> StopReason | None:
        """Run the loop on a task."""
        _import_package()
        limit = attempt_begins.get()(session.remaining_s)
        try:
            return await self._play(task, session)
        except asyncio.CancelledError:
            attempt_cancelled.get()(limit, session.remaining_s)
            raise

    async def _play(self, task: Task, session: Session) -> StopReason | None:
        if task.metadata["trouble"] == "silent":
            count_fault.get()("silent")
            return "completed"
        session.start(task.messages)
        for number in range(len(task.metadata["turns"])):
            await self._turn(task, session, number)
        return self._returned(task, session)

    def _returned(self, task: Task, session: Session) -> StopReason | None:
        """What the loop returns: a stop reason or None, unless the script wants something else."""
        trouble, draw = task.metadata["trouble"], zlib.crc32(session.messages[-1]["content"].encode())
        if trouble not in ("bad_return", "exit") or draw % 2:
            return None
        count_fault.get()(trouble)
        if trouble == "exit":
            sys.exit(3)
        returned: Any = (42, {"reward": 1.0}, 0.5, "error")[draw // 2 % 4]
        return cast("StopReason", returned)

    async def _turn(self, task: Task, session: Session, number: int) -> None:
        """One turn of the policy, and the tool after it unless it is the last."""
        turns, trouble = task.metadata["turns"], task.metadata["trouble"]
        os.close(os.open("/proc/self/stat", os.O_RDONLY))  # user code may find no descriptor
        script = turns[number]
        stop = _stop_strings(task)
        turn = await session.generate(max_new_tokens=script["max_new_tokens"], stop=stop)
        _check_stop(turn, stop)
        # A function of what was said: another attempt may fare better.
        luck = zlib.crc32(turn.text.encode()) % 2
        if trouble == "raise" and luck:
            count_fault.get()("raise")
            raise RuntimeError("the script says so")
        if trouble == "hang_loop" and luck:
            count_fault.get()("hang_loop")
            await asyncio.Future()
        if luck:
            await self._misbehave(trouble, session)
        if number + 1 < len(turns):
            await self._use_tool(script, session)
            repeats = 1
            if trouble == "too_long":
                count_fault.get()("too_long")
                repeats = 40
            session.add_messages([{"role": "tool", "content": " ".join([script["result"]] * repeats)}])

    async def _misbehave(self, trouble: str | None, session: Session) -> None:
        """Do something that loops should not do."""
        if trouble == "bad_message":
            count_fault.get()(trouble)
            session.add_messages([{"role": "tool", "content": None}])
        elif trouble == "leak_cancel":
            count_fault.get()(trouble)
            raise asyncio.CancelledError
        elif trouble == "swallow_cancel":
            try:
                await asyncio.sleep(_STRAGGLES_S)
            except asyncio.CancelledError:
                count_fault.get()(trouble)

    async def _use_tool(self, script: Mapping[str, Any], session: Session) -> None:
        try:
            async with asyncio.timeout(session.tool_timeout_s):
                if script["in_thread"]:
                    await call_in_thread(lambda: None, name="tool")
                await asyncio.sleep(script["tool_s"])
        except TimeoutError:
            count_fault.get()("slow_tool")
            session.record_tool_call(error=True)
        else:
            session.record_tool_call(error=False)


class AnswerLoop(TurnsLoop):
    """The same turns for an answer of an evaluation, which is no attempt of a trajectory."""

    async def run(self, task: Task, session: Session) -> StopReason | None:
        """Run the loop on a task of a validation set."""
        _import_package()
        before = reward_source.set(f"answer {session.trajectory_id}")
        try:
            return await self._play(task, session)
        finally:
            reward_source.reset(before)


class TreeLoop(TurnsLoop):
    """The same turns, but before each of them it branches as often as the script says.

    Branches are played to their end one after the other, or side by side with the turn.
    """

    async def _play(self, task: Task, session: Session) -> StopReason | None:
        if task.metadata["trouble"] == "silent":
            count_fault.get()("silent")
            return "completed"
        session.start(task.messages)
        await self._line(task, session, 0, branches=True)
        return self._returned(task, session)

    async def _line(self, task: Task, session: Session, first: int, *, branches: bool) -> None:
        """From a turn on to the end; a branch does not branch again where it has begun."""
        before = reward_source.set(f"trajectory {session.trajectory_id}")
        try:
            async with session:
                for number in range(first, len(task.metadata["turns"])):
                    script = task.metadata["turns"][number]
                    wanted = script["branches"] if branches or number > first else 0
                    others = [session.branch() for _ in range(min(wanted, session.remaining_branches))]
                    lines = (self._line(task, other, number, branches=False) for other in others)
                    if script["side_by_side"]:
                        async with Nursery() as side_by_side:
                            for line in lines:
                                side_by_side.start_task("branch", line)
                            side_by_side.start_task("trunk", self._turn(task, session, number))
                        continue
                    for line in lines:
                        await line
                    await self._turn(task, session, number)
        finally:
            reward_source.reset(before)


def opens_at(task: Task) -> int:
    """Let in half of the tasks one after the other."""
    draws = zlib.crc32(task.task_id.encode()) % 40
    return max(0, draws - 20)


async def reward(task: Task, completion: Completion) -> float:
    """A function of the text; fails for half of them or takes long where the script says so."""
    await _take_long(task, completion)
    return reward_in_thread(task, completion)


def reward_in_thread(task: Task, completion: Completion) -> float:
    """The same, blocking."""
    return _score(task, completion, zlib.crc32(completion.text.encode()) % 1000 / 1000)


async def group_reward(task: Task, completions: list[Completion]) -> list[float]:
    """For each member of a group a function of what it sampled, by one call for all."""
    await _take_long(task, completions[0])
    return group_reward_in_thread(task, completions)


def group_reward_in_thread(task: Task, completions: list[Completion]) -> list[float]:
    """The same, blocking."""
    return [_score(task, each, group_score(each.token_ids[each.response_mask])) for each in completions]


async def _take_long(task: Task, completion: Completion) -> None:
    if task.metadata["trouble"] == "slow_reward":
        count_fault.get()("slow_reward")
        await asyncio.sleep(zlib.crc32(completion.text.encode()) % 4)


def _score(task: Task, completion: Completion, score: float) -> float:
    drawn = zlib.crc32(completion.text.encode())
    if task.metadata["trouble"] == "flaky_reward" and drawn % 2:
        count_fault.get()("flaky_reward")
        raise RuntimeError("the script says so")
    if task.metadata["trouble"] == "bad_reward" and drawn % 2:
        count_fault.get()("bad_reward")
        return (10**5000, float("nan"), {"score": "good"}, None)[drawn // 2 % 4]  # type: ignore[return-value]
    return score
