"""Adapters in place of whole weights (`trainer.lora.sync: adapter`): servers, calls and updates."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest

from async_rl.cli.inspection.try_out import engines_from
from async_rl.cli.main import main
from async_rl.config import LoraConfig, load_config, parse_config
from async_rl.engine_protocol import AdapterUpdate, DiskUpdate
from async_rl.engines.sglang.adapter_flags import adapter_flags
from async_rl.engines.sglang.server import SGLangServer
from async_rl.errors import ConfigError, WeightSyncError
from async_rl.placement.actors import EngineActor
from async_rl.weights import checksums
from tests.support.engine_calls import Call, request
from tests.support.fake_sglang import GOOD_SERVER, FakeSGLang, event, facts, finish
from tests.support.run_config import MOE, write_run
from tests.unit.test_weight_sync import Bench, started, update_to

pytestmark = pytest.mark.real_time

LORA = LoraConfig(rank=8, targets=("attention",))
UPDATE = AdapterUpdate(weight_version=4, path="/w/version_4")


class AdapterServer(FakeSGLang):
    """A server that loads and unloads adapters."""

    def __init__(self, **adapters: str) -> None:
        super().__init__()
        self.adapters = adapters
        self.answers |= {
            "v1/models": lambda _: (200, {"data": [{"id": "m", "parent": None}, *map(self._card, adapters)]}),
            "load_lora_adapter": self._load,
            "unload_lora_adapter": self._unload,
            "update_weight_version": self._count,
        }

    def _card(self, name: str) -> dict[str, str]:
        return {"id": name, "parent": "m"}

    def _load(self, body: dict[str, str]) -> tuple[int, Any]:
        self.adapters[body["lora_name"]] = body["lora_path"]
        return 200, {"success": True, "error_message": "", "loaded_adapters": self.adapters}

    def _unload(self, body: dict[str, str]) -> tuple[int, Any]:
        del self.adapters[body["lora_name"]]
        return 200, {"success": True, "error_message": "", "loaded_adapters": self.adapters}

    def _count(self, body: dict[str, str]) -> tuple[int, Any]:
        self.answers["model_info"] = (200, {"model_path": "m", "weight_version": body["new_version"]})
        return 200, {"success": True, "message": ""}


# -- servers --------------------------------------------------------------------------------------------


def test_a_server_is_started_for_one_adapter_of_the_configs_rank_and_modules() -> None:
    lora = LoraConfig(rank=8, targets=("attention", "mlp", "experts"))
    flags = " ".join(adapter_flags(lora, facts(), "cuda"))
    modules = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"
    assert f"--lora-target-modules {modules} --lora-strict-loading" in flags
    assert {"--enable-lora", "--max-lora-rank=8", "--max-loras-per-batch=1"} <= set(flags.split())
    assert "--lora-backend=torch_native" not in flags
    assert "--lora-backend=torch_native" in adapter_flags(LORA, facts(), "cpu")
    latent = adapter_flags(LORA, msgspec.structs.replace(facts(), latent_attention=True), "cuda")
    modules = "q_a_proj q_b_proj kv_a_proj_with_mqa kv_b_proj o_proj"
    assert f"--lora-target-modules {modules}" in " ".join(latent)


@pytest.mark.parametrize(("sync", "enabled"), [("adapter", True), ("merged", False), (None, False)])
def test_servers_of_a_run_have_adapters_only_where_these_are_sent(
    tmp_path: Path, sync: str | None, enabled: bool
) -> None:
    made: list[SGLangServer] = []
    (tmp_path / "config.json").write_text(json.dumps(MOE))

    class Kept(SGLangServer):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            made.append(self)

    lora = None if sync is None else {"rank": 8, "targets": ["mlp"], "sync": sync}
    tree = {"model": {"path": str(tmp_path)}, "engine": {"device": "cpu"}, "trainer": {"lora": lora}}
    EngineActor(Kept, tree, 0, str(tmp_path))
    command = made[0].command()
    assert [option in command for option in ("--enable-lora", "--max-lora-rank=8", "down_proj")] == (
        [enabled] * 3
    )
    assert "q_proj" not in command


def test_engines_of_further_models_have_no_adapters() -> None:
    tree = {"model": {"path": "m"}, "models": {"judge": {"path": "j"}}, "trainer": {"lora": {"rank": 8}}}
    config = parse_config(tree)
    assert config.adapters == LoraConfig(rank=8)
    assert config.of_model("judge").adapters is None


@pytest.mark.parametrize(
    ("rank", "modules", "words"),
    [
        (None, None, "no --enable-lora"),
        (4, ["all"], "--max-lora-rank 4 "),
        (8, ["q_proj", "o_proj"], "--lora-target-modules o_proj q_proj, "),
        (16, ["all"], None),
        (16, ["v_proj", "q_proj", "k_proj", "o_proj", "down_proj"], None),
    ],
)
async def test_a_server_is_refused_when_it_cannot_load_the_adapters(
    rank: int | None, modules: list[str] | None, words: str | None
) -> None:
    server = AdapterServer()
    served = {"enable_lora": True, "max_lora_rank": rank, "lora_target_modules": modules}
    server.answers["server_info"] = (200, GOOD_SERVER | (served if rank else {}))
    remedy = "--enable-lora --max-lora-rank 8 --lora-target-modules q_proj k_proj v_proj o_proj, or set"
    refusal = pytest.raises(ConfigError, match=f"{words}.*start it with {remedy}")
    async with server.client(adapters=LORA) as engine:
        with refusal if words else nullcontext():
            await engine.wait_ready()


def test_check_refuses_adapters_that_a_cpu_has_no_kernels_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(write_run(tmp_path))
    here = [path, "engine.device=cpu"]
    assert main(["check", *here, "trainer.lora={targets: [attention]}"]) == 0
    assert main(["check", *here, "trainer.lora={targets: [experts], sync: merged}"]) == 0
    capsys.readouterr()
    for targets in ("attention, experts", "mlp"):
        assert main(["check", *here, f"trainer.lora={{targets: [{targets}]}}"]) == 2
        assert f"trainer.lora.targets is {targets}" in capsys.readouterr().err
    assert main(["check", path, "engine.device=cuda", "trainer.lora={targets: [experts]}"]) == 0


# -- calls ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("adapters", "sent"), [(LORA, "policy-v4"), (None, None)])
async def test_a_call_names_the_adapter_of_its_version(adapters: LoraConfig | None, sent: str | None) -> None:
    server = AdapterServer()
    server.streams = [[event([7], 1, finish_reason=finish("length"))]]
    async with server.client(adapters=adapters) as engine:
        await Call(engine, msgspec.structs.replace(request([5, 6], 1), weight_version=4)).run()
    assert server.requests("generate")[0].get("lora_path") == sent


async def test_a_call_without_a_version_does_not_reach_a_server_with_adapters() -> None:
    server = AdapterServer()
    async with server.client(adapters=LORA) as engine:
        with pytest.raises(ValueError, match="no weight version to choose an adapter by"):
            await Call(engine, request([5, 6], 1)).run()
    assert server.requests("generate") == []


async def test_a_loop_is_tried_on_the_model_without_an_adapter(tmp_path: Path) -> None:
    server = AdapterServer()
    server.streams = [[event([7], 1, finish_reason=finish("length"))]]
    async with server.serve():
        overrides = [f"engine.urls=[{server.url}]", "trainer.lora={rank: 8}", "routing.replay=off"]
        config = load_config(write_run(tmp_path), overrides)
        async with engines_from(config, tmp_path) as (engine,):
            assert (await Call(engine, request([5, 6], 1)).run()).token_ids == [7]
    assert "lora_path" not in server.requests("generate")[0]


# -- updates of a server --------------------------------------------------------------------------------


async def test_an_adapter_replaces_those_that_are_loaded_before_its_version_counts() -> None:
    """One of the same name too: a restarted trainer publishes versions again."""
    server = AdapterServer(**{"policy-v3": "/w/version_3", "policy-v4": "/old/version_4"})
    async with server.client(adapters=LORA) as engine:
        await engine.update_weights(UPDATE, flush=True)
        assert (await engine.health()).weight_version == 4
    assert server.adapters == {"policy-v4": "/w/version_4"}
    updates = ["load_lora_adapter", "flush_cache", "update_weight_version"]
    assert [name for name, _ in server.asked[1:-2]] == ["unload_lora_adapter"] * 2 + updates
    assert server.requests("load_lora_adapter") == [{"lora_name": "policy-v4", "lora_path": "/w/version_4"}]


BOTH = {"policy-v3": "/w/version_3", "policy-v4": "/w/version_4"}
REFUSED = (400, {"success": False, "error_message": "rank 9 is incompatible"})


@pytest.mark.parametrize(
    ("endpoint", "answer", "words"),
    [
        ("load_lora_adapter", REFUSED, r"load_lora_adapter of policy-v4 \(400\): rank 9 is incompat"),
        ("unload_lora_adapter", REFUSED, r"unload_lora_adapter of policy-v3 \(400\): rank 9 is incompat"),
        ("load_lora_adapter", (200, {"success": True, "loaded_adapters": BOTH}), "from /w/version_4 alone"),
    ],
)
async def test_an_update_fails_when_the_server_refuses_an_adapter_or_keeps_another(
    endpoint: str, answer: tuple[int, Any], words: str
) -> None:
    server = AdapterServer(**{"policy-v3": "/w/version_3"})
    server.answers[endpoint] = answer
    async with server.client(adapters=LORA) as engine:
        with pytest.raises(WeightSyncError, match=words):
            await engine.update_weights(UPDATE, flush=True)
    assert server.requests("update_weight_version") == []


# -- updates of a run -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("adapters", "kind"), [(True, AdapterUpdate), (False, DiskUpdate)])
async def test_engines_load_the_adapter_of_each_version_from_the_first_on(
    tmp_path: Path, adapters: bool, kind: type
) -> None:
    bench = Bench(tmp_path, adapters=adapters)
    await bench.sync.start_from_version(0, Path("/model"))
    paths = ["version_1"] if not adapters else ["version_0", "version_1"]
    await bench.sync.update_engines(1)
    for engine in bench.engines:
        assert engine.updates == [
            kind(weight_version=int(path[-1]), path=str(tmp_path / path)) for path in paths
        ]
    engine = bench.engines[0]
    bench.pool.quarantine_engine("engine-0", RuntimeError("it died"))
    engine.weight_version = 0
    bench.pool.rejoin_engine("engine-0")
    await bench.sync.catch_up_engine("engine-0")
    assert engine.updates[-2:] == [engine.updates[-1]] * 2  # once more, after its restart
    assert bench.serving() == {"engine-0": 1, "engine-1": 1}


async def test_only_the_canary_watches_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums are over the model's weights, which never change; the adapter is in the log-probs."""
    monkeypatch.setattr(checksums, "WATCH_EVERY", 1)
    bench = await started(tmp_path, adapters=True)
    bench.engines[1].answers_as = 1
    assert await update_to(bench, 1, 2) == [[0, 0], [0, 1]]
    assert [engine.log.count("sums") for engine in bench.engines] == [0, 0]
    assert [asked.weight_version for asked in bench.engines[0].requests] == [1, 2]


async def test_a_call_has_the_version_of_its_lease(tmp_path: Path) -> None:
    bench = await started(tmp_path, engines=1, adapters=True)
    await bench.sync.update_engines(1)
    bench.engines[0].scripts = [lambda _: []]
    async with bench.pool.dispatcher.lease("t", 8, prompt=4) as lease:
        async for _ in lease.generate(request([1, 2, 3, 4], 4)):
            pass
    assert [asked.weight_version for asked in bench.engines[0].requests] == [1]
