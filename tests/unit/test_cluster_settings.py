"""What a cluster asks Ray for, and how long it waits: settings of `placement` and the limits of a start."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Generator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from async_rl.config import apply_override, parse_config
from async_rl.errors import EnvironmentNotReady, TrainerError
from async_rl.placement import actor_shutdown, ray_engines, rollout_worker_actor
from async_rl.placement.actors import ActorSetup
from async_rl.placement.ray_cluster import RayCluster
from async_rl.placement.ray_trainer import RayTrainer
from async_rl.rollout.workers.worker_backend import WorkerSpec
from async_rl.runtime.supervision import first_error
from tests.support.run_config import MOE


class Asked(NamedTuple):
    """What was asked for one kind of process."""

    resources: dict[str, float]
    count: int
    strategy: str
    together: int = 1


class RecordedPlacements:
    """Placements that are there at once, unless a test lets them wait; `asked` holds what was asked for."""

    asked: dict[str, Asked]
    limits: list[float]
    wait: Callable[[], Awaitable[None]]

    def __init__(
        self, what: str, asked: dict[str, float], count: int, strategy: str, *, together: int = 1, **_: object
    ) -> None:
        self.asked[what] = Asked(asked, count, strategy, together)

    async def wait_ready(self, limit_s: float) -> None:
        self.limits.append(limit_s)

    async def why_missing(self, name: str, number: int) -> str:
        return f"{name} is missing"

    def actor_options(self, number: int) -> dict[str, Any]:
        return {}


class SilentCall:
    """A reference to a result that never comes, which can be awaited again, as Ray's."""

    def __await__(self) -> Generator[Any, None, None]:
        return asyncio.get_running_loop().create_future().__await__()


class SilentActor:
    """A handle of an actor none of whose calls returns."""

    def __getattr__(self, name: str) -> Any:
        return self

    def remote(self, *arguments: object) -> SilentCall:
        return SilentCall()


class SilentRay:
    """A Ray whose actors start and never answer; it records how they were to start."""

    def __init__(self) -> None:
        self.options_of: list[dict[str, Any]] = []
        self.actor: Callable[..., Any] = lambda *_: SilentActor()

    def remote(self, *classes: type, **options: object) -> Any:
        return self if classes else lambda each: self

    def options(self, **options: Any) -> Any:
        self.options_of.append(options)
        return type("Start", (), {"remote": staticmethod(self.actor)})

    def kill(self, actor: object) -> None: ...

    def get_runtime_context(self) -> Any:
        return self

    def get_node_id(self) -> str:
        return "driver"


@pytest.fixture
def silent_ray(monkeypatch: pytest.MonkeyPatch) -> SilentRay:
    """Put a silent Ray and recorded placements where the cluster finds the real ones."""
    fake = SilentRay()
    monkeypatch.setattr(RecordedPlacements, "asked", {}, raising=False)
    monkeypatch.setattr(RecordedPlacements, "limits", [], raising=False)
    cluster_module = sys.modules[RayCluster.__module__]  # the package has a function of this name
    for module in (cluster_module, ray_engines):
        monkeypatch.setattr(module, "Placements", RecordedPlacements)
    for module in (cluster_module, ray_engines, rollout_worker_actor, actor_shutdown):
        monkeypatch.setattr(module, "ray", fake)
    monkeypatch.setattr(rollout_worker_actor, "node_address", lambda: "127.0.0.1")
    return fake


SETUP: Final = ActorSetup(".", ".shared", "marker", "driver")


def tree_of(folder: Path, *overrides: str) -> dict[str, Any]:
    """Return a config on a CPU with these settings, as plain values."""
    (folder / "config.json").write_text(json.dumps(MOE))
    tree: dict[str, Any] = {
        "model": {"path": str(folder)},
        "engine": {"device": "cpu"},
        "trainer": {"device": "cpu"},
    }
    for override in overrides:
        apply_override(tree, override)
    return tree


def cluster_of(folder: Path, *overrides: str) -> RayCluster:
    return RayCluster(parse_config(tree_of(folder, *overrides)), folder)


REQUESTS: Final[dict[str, Callable[[dict[str, Asked]], Any]]] = {
    "placement.resources_per_engine={CPU: 3}": lambda asked: asked["engine"].resources.get("CPU") == 3,
    "placement.resources_per_engine={GPU: 0.5}": lambda asked: asked["engine"].resources["GPU"] == 0.5,
    "placement.resources_per_engine={fast: 2}": lambda asked: asked["engine"].resources.get("fast") == 2,
    "engine.num_engines=3": lambda asked: asked["engine"].count == 3,
    "placement.resources_per_rank={CPU: 3}": lambda asked: asked["trainer rank"].resources.get("CPU") == 3,
    "placement.resources_per_rank={GPU: 0.5}": lambda asked: asked["trainer rank"].resources["GPU"] == 0.5,
    "placement.resources_per_rank={fast: 2}": lambda asked: asked["trainer rank"].resources.get("fast") == 2,
    "trainer.num_ranks=3": lambda asked: asked["trainer rank"].count == 3,
    "trainer.device=cuda": lambda asked: asked["trainer rank"].resources["GPU"] == 1,
}


@pytest.mark.parametrize("override", REQUESTS)
def test_ray_is_asked_for_what_a_setting_says(tmp_path: Path, silent_ray: SilentRay, override: str) -> None:
    cluster_of(tmp_path)
    assert not REQUESTS[override](RecordedPlacements.asked)
    cluster_of(tmp_path, override)
    assert REQUESTS[override](RecordedPlacements.asked)


@pytest.mark.parametrize(
    ("overrides", "together"),
    [
        (["trainer.layout={ep: 4, tp: 2}"], 4),
        (["trainer.layout={tp: 2, cp: 4, ep: 2}"], 8),
    ],
)
def test_ranks_that_exchange_the_most_are_placed_together(
    tmp_path: Path, silent_ray: SilentRay, overrides: list[str], together: int
) -> None:
    cluster_of(tmp_path, "trainer.num_ranks=8", *overrides)
    assert RecordedPlacements.asked["trainer rank"].together == together


def test_an_engine_on_several_nodes_has_a_place_on_each(tmp_path: Path, silent_ray: SilentRay) -> None:
    cluster_of(tmp_path, "engine={device: cuda, num_engines: 3, tp_size: 16, num_nodes: 2}")
    asked = RecordedPlacements.asked["node of an engine"]
    assert (asked.count, asked.resources["GPU"]) == (6, 8)


async def test_a_model_has_engines_of_its_own_and_places_for_them(
    tmp_path: Path, silent_ray: SilentRay
) -> None:
    model = f"models={{teacher: {{path: {tmp_path}, num_engines: 2, tp_size: 4}}}}"
    cluster = cluster_of(tmp_path, model, "engine.device=cuda", "engine.start_timeout_s=70")
    assert RecordedPlacements.asked["engine"].count == 1
    frozen = cluster.engines_of("teacher")
    assert cluster.engines_of("teacher") is frozen
    asked = RecordedPlacements.asked["engine"]
    assert (asked.count, asked.resources["GPU"]) == (2, 4)
    await ends_after(frozen.start_engines(), says="teacher-")


async def ends_after(
    start: Awaitable[Any], error: type[Exception] = EnvironmentNotReady, says: str = ""
) -> float:
    begin_s = asyncio.get_running_loop().time()
    with pytest.raises((error, ExceptionGroup)) as caught:  # a group where several engines start
        await start
    assert isinstance(first_error(caught.value), error)
    assert says in str(first_error(caught.value))
    return asyncio.get_running_loop().time() - begin_s


async def test_placements_are_waited_for_as_long_as_the_config_says(
    tmp_path: Path, silent_ray: SilentRay
) -> None:
    limits = ("engine.start_timeout_s=1", "trainer.start_timeout_s=1")
    cluster = cluster_of(tmp_path, "placement.wait_s=7", *limits)
    await ends_after(cluster.start_engines())
    await ends_after(cluster.start_trainer())
    assert RecordedPlacements.limits == [7, 7]


async def test_a_start_of_servers_ends_with_an_error_after_its_limit(
    tmp_path: Path, silent_ray: SilentRay
) -> None:
    assert await ends_after(cluster_of(tmp_path, "engine.start_timeout_s=70").start_engines()) == 70


async def test_a_start_of_ranks_ends_with_an_error_after_its_limit(
    tmp_path: Path, silent_ray: SilentRay
) -> None:
    cluster = cluster_of(tmp_path, "trainer.start_timeout_s=70")
    assert await ends_after(cluster.start_trainer(), says="= 70.0. trainer rank 0 is missing") == 70


async def test_a_step_of_ranks_ends_with_an_error_after_its_limit(
    tmp_path: Path, silent_ray: SilentRay
) -> None:
    config = parse_config(tree_of(tmp_path, "trainer.step_timeout_s=70"))
    logs = [tmp_path / "trainer-0.log"]
    trainer = RayTrainer([SilentActor()], ["driver"], logs, config, "driver", lambda node: SilentActor())
    assert await ends_after(trainer.train_step("batch", 1), TrainerError) == 70


class TrainingRank(SilentActor):
    """The actor of a rank that is in a step: only its thread for weights answers."""

    def options(self, *, concurrency_group: str) -> Any:
        async def answer() -> tuple[str, int]:
            return concurrency_group, 15000

        return type("Call", (), {"remote": staticmethod(answer)})


async def test_an_engine_gets_a_port_during_a_step_when_weights_are_sent_beside_it(
    tmp_path: Path, silent_ray: SilentRay
) -> None:
    silent_ray.actor = lambda *_: TrainingRank()

    async def open_port(*overrides: str) -> Awaitable[tuple[str, int]]:
        cluster = cluster_of(tmp_path, "weights.transport=distributed", "weights.timeout_s=70", *overrides)
        await ends_after(cluster.start_trainer())  # whose ranks do not join
        return cluster.open_port(0)

    assert await (await open_port("weights.overlap=true")) == ("weights", 15000)
    assert await ends_after(await open_port(), TrainerError) == 70


async def start_worker(folder: Path, *overrides: str) -> None:
    config = parse_config(tree_of(folder, *overrides))
    spec = WorkerSpec(name="worker 0", config=config, folder=folder, frames=folder, inspected=None, node=None)
    async with rollout_worker_actor.rollout_worker(spec, SETUP, folder / "log"):
        pass


async def test_a_start_of_rollout_workers_ends_with_an_error_after_its_limit(
    tmp_path: Path, silent_ray: SilentRay
) -> None:
    assert await ends_after(start_worker(tmp_path)) == 120


async def test_a_rollout_worker_reserves_its_cpus_and_runs_where_its_resources_are(
    tmp_path: Path, silent_ray: SilentRay
) -> None:
    reserved = "placement.resources_per_rollout_worker={CPU: 3, near: 2}"
    await ends_after(start_worker(tmp_path, reserved))
    (options,) = silent_ray.options_of
    assert options["num_cpus"] == 3
    assert (options["resources"], options["scheduling_strategy"]) == ({"near": 2}, "SPREAD")
