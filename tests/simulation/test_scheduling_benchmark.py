"""`benchmarks/scheduling.py`: all policies in a tiny world, and the same turns for peers and for ours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from async_rl.planning.workload import Workload
from benchmarks import scheduling
from benchmarks.scheduling import OURS, Ours, jobs_in, run_job
from benchmarks.support.peer_schedulers import PEERS, PeerPolicy, RollingKept
from benchmarks.support.worlds import WORLDS, Length, Policy, World

TINY = World(
    name="tiny",
    workload=Workload(
        shares_prompts=False, turns=2, tool_tokens=256, tool_s=20.0, tool_sigma=1.0, max_tokens=16384
    ),
    bounds={4: 3},
    engines=2,
    slots=8,
    group_size=2,
)
SHORT = Length(versions=3, warmup=3)

FIELDS = {
    *("world", "policy", "interrupt", "merge", "groups", "bound", "relative", "dropped", "masked"),
    *("staleness_mean", "staleness_p99", "staleness_max", "trainer_idle", "prefilled", "ks"),
}


@pytest.mark.parametrize("policy", [*PEERS, *OURS], ids=lambda policy: f"{policy.name}-{policy.bound}")
def test_each_policy_trains_within_the_fluid_bound_in_a_tiny_world(policy: Policy) -> None:
    bound = 3 if policy.bound is None else policy.bound
    row = run_job(TINY, policy, 4, bound, SHORT, seeds=1)
    assert set(row) == FIELDS
    assert 0 < row["relative"] < 1
    assert 0 <= row["staleness_mean"] <= row["staleness_max"]
    if policy.name.startswith(("async_rl", "prime-rl", "synchronous", "one step")):
        assert row["staleness_max"] <= bound
    merges = {None: None, "abort": "replace", "in_place": "splice"}
    assert row["merge"] == merges[row["interrupt"]]


def test_every_policy_with_a_bound_runs_at_that_of_each_world() -> None:
    for world in WORLDS.values():
        for groups, bound in world.bounds.items():
            jobs = [(policy.name, at) for policy, n, at in jobs_in(world) if n == groups]
            assert len(set(jobs)) == len(jobs)
            for policy in (*PEERS, *OURS):
                if policy.bound is None and not policy.only:
                    assert (policy.name, bound) in jobs


@pytest.mark.parametrize("seed", [0, 1])
def test_tools_take_as_long_for_peers_as_for_ours(seed: int) -> None:
    # Admission, slots and interruption are the same here, so all that is left to differ is the work.
    workload = replace(
        TINY.workload, turns=4, tool_s=50.0, tool_sigma=1.5, sync_s=0.0, train_tokens_per_s=1e12
    )
    world = replace(TINY, workload=workload, engines=1, slots=2)
    ours, peer = (
        policy.run(world, 1, 3, seed, Length(versions=8, warmup=2))
        for policy in (Ours(name=""), PeerPolicy(name="", kind=RollingKept))
    )
    for figure in ("relative", "prefilled", "ks"):
        assert ours[figure] == pytest.approx(peer[figure], rel=1e-6)


def test_training_takes_most_of_the_fluid_generation_time_in_the_hardware_world() -> None:
    world = WORLDS["hardware"]
    trajectories = 128 * world.group_size
    sampled = trajectories * world.workload.expected_tokens
    train_s = world.workload.train_s(trajectories * world.workload.trajectory_tokens, sampled, world.fluid)
    assert train_s == pytest.approx(0.92 * trajectories / world.fluid, rel=0.01)


def test_rows_are_written_as_json_when_a_world_is_chosen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = []

    def compare(worlds: list[World], *, quick: bool) -> list[dict[str, object]]:
        chosen.extend(worlds)
        return [run_job(TINY, PEERS[0], 4, 0, SHORT, seeds=2)]

    monkeypatch.setattr(scheduling, "compare", compare)
    file = tmp_path / "rows.json"
    names = ["long_tail", "multi_turn"]
    monkeypatch.setattr(
        "sys.argv", ["scheduling.py", "--quick", "--json", str(file), *(f"--world={n}" for n in names)]
    )
    scheduling.main()
    (row,) = json.loads(file.read_text())
    assert set(row) == FIELDS
    assert [row["world"], row["policy"], row["bound"]] == ["tiny", "synchronous, colocated", 0]
    assert row["interrupt"] is row["merge"] is None
    assert chosen == [WORLDS[name] for name in names]
