"""Diagnoses of small graphs of waits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from async_rl.observability.diagnosis import (
    Diagnosis,
    EngineView,
    QueueView,
    RunSnapshot,
    SlotsView,
    diagnose,
)
from async_rl.runtime.waits import WAIT_KINDS, Wait, WaitingActor, WaitNode

LOOP, ROLLOUTS, REPAIR, EVALUATION = (
    WaitNode("train loop"),
    WaitNode("service", "rollouts"),
    WaitNode("service", "repair"),
    WaitNode("service", "evaluation"),
)
LIMITS = {
    "chunk": 60.0,
    "engine start": 600.0,
    "engine update": 300.0,
    "evaluation": 900.0,
    "tool": 30.0,
    "trainer step": 3600.0,
}


def problems(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    return [(cause.problem, cause.on) for cause in diagnosis.causes]


def wait(who: WaitNode, on: str, target: str = "", age_s: float = 400.0, **more: Any) -> Wait:
    return Wait(who=who, on=on, target=target, age_s=age_s, **more)


def actor(who: WaitNode, parent: WaitNode | None = None, untouched_s: float = 400.0) -> WaitingActor:
    return WaitingActor(who=who, parent=parent, untouched_s=untouched_s)


def look(
    *waits: Wait, quiet_s: float = 400.0, actors: list[WaitingActor] | None = None, **more: Any
) -> Diagnosis:
    known = {wait.who: actor(wait.who) for wait in waits} | {a.who: a for a in actors or []}
    snapshot = RunSnapshot(
        quiet_s=quiet_s, stall_s=45.0, waits=waits, actors=list(known.values()), limits_s=LIMITS, **more
    )
    return diagnose(snapshot)


def group(name: str) -> list[WaitingActor]:
    """Return a group with one trajectory."""
    return [
        actor(WaitNode("group", name), ROLLOUTS),
        actor(WaitNode("trajectory", f"{name}-0"), WaitNode("group", name)),
    ]


def queue(*in_flight: str, **more: Any) -> QueueView:
    return QueueView(
        **{"num_ready": 4, "groups_per_batch": 4, "in_flight": in_flight, "due": (), "admits": False} | more
    )


def test_a_group_is_not_lost_when_an_earlier_process_left_it_and_it_waits_for_a_slot() -> None:
    tool = wait(WaitNode("trajectory", "g-0"), "tool", "search")
    waits = [wait(LOOP, "batch"), wait(ROLLOUTS, "slot"), tool]
    state = {"actors": group("g"), "slots": SlotsView(limit=1, holders=("g-0",))}
    left = look(*waits, queue=queue("left", due=("left",), restored=("left",)), **state)
    assert problems(left) == [("hangs", "tool")]
    lost = look(*waits, queue=queue("left", due=("left",)), **state)
    assert [(cause.problem, cause.on, cause.target) for cause in lost.causes] == [("lost", "group", "left")]


def test_the_watch_over_a_worker_that_answers_holds_up_no_trajectory() -> None:
    watch = WaitNode("service", "watch")
    diagnosis = look(
        wait(LOOP, "batch"),
        wait(ROLLOUTS, "trajectories"),
        wait(WaitNode("group", "g"), "trajectories"),
        wait(WaitNode("trajectory", "g-0"), "agent loop", "loops:Mine", limit_s=900.0),
        wait(watch, "idle", age_s=1.0),
        actors=[*group("g"), actor(watch, ROLLOUTS)],
        queue=queue("g", num_ready=0),
    )
    assert (diagnosis.state, [cause.on for cause in diagnosis.causes]) == ("quiet", ["agent loop"])


def test_an_engine_in_an_update_is_not_the_culprit_but_the_update_is() -> None:
    diagnosis = look(
        wait(LOOP, "weight update", "4"),
        wait(LOOP, "engine update", "engine-1", age_s=399),
        wait(WaitNode("trajectory", "g-0"), "chunk", "engine-1"),
        engines=[EngineView(engine_id="engine-1", state="updating")],
    )
    assert (diagnosis.causes[0].on, diagnosis.causes[0].target) == ("engine update", "engine-1")
    assert len(diagnosis.causes) == 1


def test_calls_without_an_engine_wait_for_its_restart_and_for_the_service_that_does_it() -> None:
    waits = [
        wait(LOOP, "batch"),
        wait(WaitNode("group", "g"), "trajectories"),
        wait(WaitNode("trajectory", "g-0"), "engine"),
    ]
    state = {
        "queue": queue("g"),
        "engines": [EngineView(engine_id="engine-0", state="quarantined", error="it died")],
    }
    restarting = look(
        *waits, wait(REPAIR, "idle"), wait(REPAIR, "engine start", "engine-0"), actors=group("g"), **state
    )
    assert (restarting.causes[0].on, restarting.state) == ("engine start", "quiet")
    idle = look(*waits, wait(REPAIR, "idle"), actors=group("g"), **state)
    assert (idle.causes[0].problem, idle.state) == ("asleep", "stalled")
    dead = look(*waits, actors=group("g"), **state)
    assert (dead.causes[0].problem, dead.causes[0].target) == ("dead", "repair")
    assert dead.state == "stalled"


def test_calls_without_an_engine_wait_for_the_evaluation_that_has_it() -> None:
    waits = [
        wait(LOOP, "batch"),
        wait(WaitNode("group", "g"), "trajectories"),
        wait(WaitNode("trajectory", "g-0"), "engine"),
        wait(REPAIR, "idle"),
    ]
    state = {"queue": queue("g"), "engines": [EngineView(engine_id="engine-0", state="evaluating")]}
    begun = look(*waits, wait(EVALUATION, "evaluation"), actors=group("g"), **state)
    assert (begun.causes[0].on, begun.state) == ("evaluation", "quiet")
    hanging = look(*waits, wait(EVALUATION, "evaluation", age_s=1000.0), actors=group("g"), **state)
    assert (hanging.causes[0].problem, hanging.state) == ("hangs", "stalled")
    ended = look(*waits, wait(EVALUATION, "engine update", "engine-0"), actors=group("g"), **state)
    assert (ended.causes[0].on, ended.causes[0].target) == ("engine update", "engine-0")


def test_calls_do_not_wait_for_engines_that_are_reserved_for_evaluations() -> None:
    reserved = [
        EngineView(engine_id="engine-1", state="evaluating", reserved=True),
        EngineView(engine_id="engine-2", state="quarantined", reserved=True),
    ]
    diagnosis = look(
        wait(LOOP, "batch"),
        wait(LOOP, "engine update", "engine-0", age_s=200.0),
        wait(WaitNode("group", "g"), "trajectories"),
        wait(WaitNode("trajectory", "g-0"), "engine"),
        wait(REPAIR, "idle"),
        wait(EVALUATION, "idle"),
        actors=group("g"),
        queue=queue("g"),
        engines=[EngineView(engine_id="engine-0", state="updating"), *reserved],
    )
    assert ([cause.on for cause in diagnosis.causes], diagnosis.state) == (["engine update"], "quiet")


def test_calls_wait_for_others_when_the_engines_that_serve_are_full() -> None:
    waits = [
        wait(LOOP, "batch"),
        wait(WaitNode("group", "g"), "trajectories"),
        wait(WaitNode("trajectory", "g-0"), "engine", why="engine-0 serving"),
        wait(WaitNode("trajectory", "h-0"), "first chunk", "engine-0", age_s=40.0),
        wait(WaitNode("trajectory", "h-1"), "first chunk", "engine-0", age_s=390.0),
    ]
    engines = [EngineView(engine_id="engine-0", state="serving", patience_s=60)]
    state = {"actors": group("g") + group("h"), "engines": engines, "unheard_s": {"engine-0": 390.0}}
    silent = look(*waits, queue=queue("g"), has_capacity=False, **state)
    assert problems(silent) == [("silent", "first chunk")]
    assert "trajectory h-1 waits for the first chunk of engine-0 (390 s" in silent.text
    state["engines"] = [EngineView(engine_id="engine-0", state="serving", patience_s=500)]
    slow = look(*waits, queue=queue("g"), has_capacity=False, **state)
    assert (slow.state, slow.causes[0].problem) == ("quiet", "none")
    missed = look(*waits, queue=queue("g"), **state)
    assert (missed.state, missed.causes[0].problem) == ("stalled", "asleep")
    paused = look(*waits[:3], queue=queue("g"), has_capacity=False, **state)
    assert problems(paused) == [("hangs", "engine")]


def test_a_batch_waits_for_the_dispatcher_when_there_are_not_enough_groups() -> None:
    short = queue("g", num_ready=2)
    waits = [wait(LOOP, "batch"), wait(WaitNode("group", "g"), "capacity")]
    dead = look(*waits, actors=group("g"), queue=short)
    assert (dead.causes[0].on, dead.causes[0].target) == ("service", "rollouts")
    full = look(*waits, wait(ROLLOUTS, "admission", why="the spool is full"), queue=short)
    assert {cause.problem for cause in full.causes} == {"deadlock"}
    assert {cause.on for cause in full.causes} == {"capacity", "admission"}


def test_a_deadlock_is_no_cause_where_somebody_can_still_move() -> None:
    diagnosis = look(
        wait(LOOP, "batch"),
        wait(WaitNode("group", "g"), "capacity"),
        wait(WaitNode("group", "h"), "trajectories"),
        wait(WaitNode("trajectory", "h-0"), "tool", "search", age_s=20.0),
        actors=group("g") + group("h"),
        queue=queue("g", "h"),
    )
    assert problems(diagnosis) == [("none", "tool")]
    assert diagnosis.state == "quiet"  # within its limit


def test_a_step_is_judged_by_those_before_it_and_the_first_by_its_limit() -> None:
    def step(**more: Any) -> str:
        return look(wait(LOOP, "trainer step", "9", age_s=400.0), **more).state

    assert step() == "quiet"
    assert step(longest_s={"trainer step": 120.0}) == "quiet"
    assert step(longest_s={"trainer step": 10.0}) == "stalled"


def test_a_wait_over_its_limit_is_seen_while_the_run_moves() -> None:
    def search(age_s: float) -> Diagnosis:
        return look(wait(WaitNode("trajectory", "g-0"), "tool", "search", age_s=age_s), quiet_s=0.1)

    assert (search(40.0).state, search(40.0).causes[0].target) == ("overdue", "search")
    assert search(31.0).state == "moving"


def test_a_wait_within_its_limit_is_no_fault() -> None:
    step = look(wait(LOOP, "trainer step", "3", age_s=1.8), quiet_s=1.0)
    assert problems(step) == [("none", "trainer step")]
    quiet = look(wait(LOOP, "trainer step", "1", age_s=60.0), quiet_s=60.0)
    assert (quiet.state, quiet.causes[0].problem) == ("quiet", "none")
    assert "likely cause" not in quiet.text
    assert look(wait(LOOP, "tool", age_s=29.0), longest_s={"tool": 0.01}).state == "quiet"


def test_only_a_run_without_progress_judges_a_step_by_those_before_it() -> None:
    """A repair ends all waits with a fault: it must not end this step because a tool is late."""
    step = wait(LOOP, "trainer step", "9", age_s=50.0)
    tool = wait(WaitNode("trajectory", "g-0"), "tool", "search", age_s=40.0)
    late = look(step, tool, quiet_s=1.0, longest_s={"trainer step": 2.0})
    assert [(cause.on, cause.problem, cause.limit_s) for cause in late.causes] == [
        ("tool", "hangs", 30.0),
        ("trainer step", "none", 3600.0),
    ]


def test_a_wait_without_a_limit_is_no_fault_while_the_run_moves() -> None:
    disk = look(wait(LOOP, "disk", age_s=400.0), quiet_s=1.0)
    assert (disk.state, disk.causes[0].problem) == ("moving", "none")
    assert look(wait(LOOP, "disk", age_s=400.0)).causes[0].problem == "hangs"


def test_the_engines_own_watch_judges_calls_while_the_run_moves() -> None:
    """sglang#22511: a call in the queue of a busy engine is not a hang."""
    assert look(wait(WaitNode("trajectory", "g-0"), "first chunk", "engine-0"), quiet_s=0.1).state == "moving"


@pytest.mark.parametrize("kind", WAIT_KINDS)
def test_every_kind_of_wait_can_be_diagnosed(kind: str) -> None:
    diagnosis = look(wait(LOOP, kind, "engine-0"))
    assert diagnosis.causes
    assert "{}" not in diagnosis.text


def test_every_wait_of_the_code_is_a_known_kind() -> None:
    package = Path(__file__).parents[2] / "async_rl"
    code = "".join(file.read_text() for file in package.rglob("*.py"))
    opened = set(re.findall(r'\bwaiting\(\s*"([^"]+)"', code))
    assert opened <= set(WAIT_KINDS)
    assert len(opened) > len(WAIT_KINDS) / 2
