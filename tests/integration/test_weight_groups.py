"""Weights sent to processes by Gloo, some of which are stopped or killed in the middle."""

import asyncio
import signal
from pathlib import Path

import pytest

from tests.support.receiving_world import Ranks, even_tensors, receiving_world

pytestmark = pytest.mark.real

PAUSE_LIMIT_S = 30.0
"""A guard: 10 s without progress and what a busy machine takes; without the limit it would be minutes."""


def ranks(num_senders: int) -> Ranks:
    return Ranks(num_senders, 16 << 20, even_tensors(16 << 20, 4))


@pytest.mark.parametrize("num_senders", [1, 2])
async def test_all_engines_receive_what_each_sender_sends_once(tmp_path: Path, num_senders: int) -> None:
    async with receiving_world(tmp_path, ranks(num_senders), [()] * 3) as world:
        for version in (1, 2):
            digest = world.ranks.change()
            report = await world.sync.update_engines(version)
            assert world.serving() == {f"engine-0{number}": version for number in range(3)}
            assert {engine.digest for engine in world.engines} == {digest}
            assert report.num_bytes == 4 * (16 << 20)
            assert {"gather", "send"} <= report.parts.keys()
            assert report.parts["gather"] + report.parts["send"] <= report.total_s
        await world.sync.close()


@pytest.mark.parametrize("fault", ["SIGSTOP", "SIGKILL"])
@pytest.mark.parametrize(("when", "at"), [("before", "0"), ("during", "1"), ("between", "1")])
@pytest.mark.parametrize("num_senders", [1, 2])
async def test_an_engine_that_stops_or_dies_is_cut_out_and_harms_no_other(
    tmp_path: Path, fault: str, when: str, at: str, num_senders: int
) -> None:
    """The others have the version in time, from a trainer that continues, and take the next one."""
    async with receiving_world(tmp_path, ranks(num_senders), [(), (fault, when, at), (), ()]) as world:
        digest = world.ranks.change()
        healthy = [engine for number, engine in enumerate(world.engines) if number != 1]
        update = asyncio.create_task(world.sync.update_engines(1))
        async with asyncio.timeout(PAUSE_LIMIT_S):
            while world.serving() != {engine.engine_id: 1 for engine in healthy}:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert {engine.digest for engine in healthy} == {digest}
        await world.engines[1].end()  # as repair does
        await update
        digest = world.ranks.change()
        await world.sync.update_engines(2)
        assert world.serving() == {engine.engine_id: 2 for engine in healthy}
        assert {engine.digest for engine in healthy} == {digest}


async def test_a_slow_engine_is_waited_for(tmp_path: Path) -> None:
    """It stands still for most of the limit, and not for longer."""
    async with receiving_world(tmp_path, ranks(1), [(), ("SIGSTOP", "between", "0")]) as world:
        digest = world.ranks.change()

        async def thaw() -> None:
            await asyncio.sleep(6.0)
            world.engines[1].process.send_signal(signal.SIGCONT)

        await asyncio.gather(world.sync.update_engines(1), thaw())
        assert world.serving() == {"engine-00": 1, "engine-01": 1}
        assert {engine.digest for engine in world.engines} == {digest}
