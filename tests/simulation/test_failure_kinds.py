"""Whole runs in which attempts fail in every way: each is counted by its kind; only answers are scored."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import ClassVar

import pytest

from agent_loops.tool_loop import ToolLoop
from async_rl.errors import SandboxLost, ToolBroken
from async_rl.observability.metrics import value_of
from async_rl.rollout.session.api import Session
from async_rl.store.ledger_tables import read_attempts
from async_rl.types import Completion, StopReason, Task
from tests.simulation.test_loop import assert_conserved, make_config, metrics_of_the_run, run
from tests.support.local_cluster import LocalCluster

FAILURES = {
    "broken": "tool_broken",
    "lost": "sandbox_lost",
    "hang": "time_over",
    "raise": "agent_wrong",
    "judge": "other",
}
WRONG = {"wrong": "agent_wrong", "cut": "context_full", "buggy": "tool_broken"}


class Fails:
    """Each attempt ends in the next way; a hanging one is ended by the limit of trajectories."""

    ways: ClassVar[dict[str, str]] = {}
    """The way of each trajectory's newest attempt."""
    ended: ClassVar[Counter[str]] = Counter()

    async def run(self, task: Task, session: Session) -> StopReason | None:
        session.start(task.messages)
        await session.generate()
        known = [*FAILURES, *WRONG, "right"]
        way = self.ways[session.trajectory_id] = known[self.ended.total() % len(known)]
        self.ended[way] += 1
        match way:
            case "broken":
                raise ToolBroken("the index is gone\nand more")
            case "lost":
                raise SandboxLost("no container left")
            case "hang":
                await asyncio.Event().wait()
            case "raise":
                raise KeyError(way)
            case "buggy":
                session.record_tool_call(error=True, fault="search: AttributeError: no index")
        return "max_turns" if way == "cut" else None


class Judge:
    """Scores by the way in which an attempt has ended."""

    scored: ClassVar[Counter[str]] = Counter()

    @classmethod
    def score(cls, task: Task, completion: Completion) -> float:
        way = list(Fails.ways.values())[-1]
        if way == "judge":
            raise ConnectionError("the judge is gone")
        cls.scored[way] += 1
        return float(way == "right")


async def test_attempts_are_counted_by_kind_over_a_restart(
    calculator: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Fails.ways.clear()
    Fails.ended.clear()
    Judge.scored.clear()
    overrides = (
        f"rollout.agent_loop={__name__}:Fails",
        f"rollout.reward={__name__}:Judge.score",
        "rollout.trajectory_timeout_s=0.2",
        "rollout.max_concurrent_trajectories=1",
        "rollout.group_size=2",
        "rollout.max_failed_share=1.0",
        "rollout.min_group_size=1",
        "rollout.max_filtered_groups=1000",
        "trainer.groups_per_batch=2",
        "run.drain_s=0.01",
    )
    totals: list[Counter[str]] = []
    for steps in (2, 4):
        metrics = metrics_of_the_run(monkeypatch)
        config = make_config(calculator, tmp_path, f"run.max_steps={steps}", *overrides)
        cluster = LocalCluster(config, step_s=0.02)
        summary = await run(config, cluster)
        assert_conserved(summary)
        counts = read_attempts(tmp_path / "sim" / "ledger.sqlite")
        assert summary.failures == counts.rows()
        for kind, number in counts.numbers.items():
            assert value_of(metrics.attempts_total.labels(kind)) == number
        totals.append(counts.numbers)

    expected = Counter[str]()
    for way, number in Fails.ended.items():
        expected[FAILURES.get(way) or WRONG.get(way) or "success"] += number
    first, second = totals
    assert first.total() < second.total()
    # Those that run at the end of each of the two processes have not ended.
    assert 0 <= expected.total() - second.total() <= 2
    assert all(expected[kind] - second[kind] in (0, 1, 2) for kind in expected)
    assert set(second) == {*FAILURES.values(), *WRONG.values(), "success"}
    assert set(Judge.scored) == {*WRONG, "right"}, "what failed around an agent has no score"
    examples = {row.kind: row.examples for row in summary.failures}
    assert all(1 <= len(each) <= 3 for each in examples.values())
    assert {example.error for example in examples["sandbox_lost"]} == {"no container left"}
    told = {example.error for example in examples["tool_broken"]}
    ended = ("completed", "length")  # answers of that loop have random lengths
    broken = {f"search: AttributeError: no index (reward 0, {how})" for how in ended}
    assert told <= {"the index is gone", *broken}


class BrokenAtOnce(ToolLoop):
    """Breaks a tool for the first attempts of 32 trajectories."""

    broken: ClassVar[set[str]] = set()

    def __init__(self) -> None:
        super().__init__(["agent_loops.calculator:calculator"])

    async def run(self, task: Task, session: Session) -> StopReason | None:
        session.start(task.messages)
        await session.generate()
        if len(self.broken) < 32 and session.trajectory_id not in self.broken:
            self.broken.add(session.trajectory_id)
            raise ToolBroken("the connection to the MCP server broke")
        return None


async def test_a_run_goes_on_when_one_broken_tool_fails_all_running_attempts(
    calculator: Path, tmp_path: Path
) -> None:
    BrokenAtOnce.broken.clear()
    config = make_config(
        calculator, tmp_path, f"rollout.agent_loop={__name__}:BrokenAtOnce", "rollout.max_failed_share=0.1"
    )
    summary = await run(config, LocalCluster(config, step_s=0.02))
    assert summary.weight_versions == 6
    assert not summary.trajectories.dropped
    (broken,) = [row for row in summary.failures if row.kind == "tool_broken"]
    assert broken.number == 32
