"""The memory that a run needs: of ranks and engines against GPUs, of Megatron's layouts, of trajectories."""

from __future__ import annotations

import json
import math
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

import trainer
from async_rl.cli.main import main
from async_rl.config import Config, LayoutConfig, load_config
from async_rl.engine_protocol import EngineFacts
from async_rl.engines.model_facts import ARCHITECTURES, load_facts, read_config
from async_rl.engines.model_files import check_weights
from async_rl.errors import ConfigError
from async_rl.rollout.session.tokens import GrowingMask
from async_rl.run.memory_estimate import DeviceUse, estimate_devices, nearest_change, parse_size
from async_rl.run.memory_needs import describe_memory, trajectory_bytes
from async_rl.types import SamplingMask
from tests.support import tiny_model
from tests.support.run_config import config_with
from trainer.memory import activations
from trainer.memory.activations import in_flight
from trainer.memory.dimensions import chunks_of, dimensions_of, parameters_of
from trainer.supported_values import KNOWN_MODEL_TYPES

QWEN3_30B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "tie_word_embeddings": False,
}
"""The dimensions of Qwen/Qwen3-30B-A3B, as in its config.json."""

PARAMETERS = 30_532_122_624
"""Of that model, by its safetensors index: total_size / 2."""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(QWEN3_30B))
    tree: dict[str, Any] = {
        "model": {"path": str(tmp_path / "model"), "dtype": "bfloat16"},
        "data": {"path": "unused.jsonl"},
        "rollout": {"max_context_tokens": 16384, "max_new_tokens": 8192, "group_size": 8},
        "engine": {"device": "cuda", "num_engines": 4, "tp_size": 2},
        "trainer": {
            "device": "cuda",
            "num_ranks": 8,
            "layout": {"ep": 8},
            "recompute": "full",
            "groups_per_batch": 64,
            "micro_batch_tokens": 16384,
            "require_transformer_engine": False,
        },
    }
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(tree))
    return path


Check = Callable[..., str]


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str]) -> Check:
    """Run `async-rl check --memory` and return what it prints, if it ends as expected."""

    def run(path: Path, *arguments: str, gpu: str | None = "80GB", code: int = 0) -> str:
        size = [] if gpu is None else ["--gpu", gpu]
        assert main(["check", str(path), "--memory", *size, *arguments]) == code
        return capsys.readouterr().out

    return run


def change_in(out: str) -> list[str]:
    return out.split("nearest change that fits: ")[1].split()


def rank_of(config: Path, *overrides: str) -> DeviceUse:
    """What the first trainer rank holds."""
    (rank, *_) = estimate_devices(load_config(config, overrides), 80 * 10**9)
    return rank


def test_the_parameters_of_a_published_model_are_counted(config: Path) -> None:
    (engines,) = [use for use in estimate_devices(load_config(config), 80 * 10**9) if "engine" in use.name]
    assert engines.parts["weights"] == PARAMETERS  # of two bytes, over two GPUs


def test_an_engine_keeps_the_models_weights_on_its_host_when_it_shares_devices_and_loads_adapters(
    config: Path,
) -> None:
    def engine(*overrides: str) -> tuple[int, int]:
        """The adapter on its device, and the weights on its host."""
        uses = estimate_devices(load_config(config, overrides), 80 * 10**9)
        (found,) = [use for use in uses if "engine" in use.name]
        return found.parts.get("adapter", 0), found.host.get("weights", 0)

    # Queries, keys and values have a copy of A each; those of B, and all of the output's A, are split in two.
    a, b = 3 * 2048 + 4096 // 2, (4096 + 2 * 512) // 2 + 2048
    adapter = 48 * 16 * (a + b) * 2
    shared, merged = "placement.shared=true", "trainer.lora={sync: merged}"
    assert engine("trainer.lora={rank: 16}") == (adapter, 0)
    assert engine("trainer.lora={rank: 16}", shared) == (adapter, PARAMETERS)
    assert engine(merged, shared) == engine(shared) == (0, 0)


HANDED_OVER = ("placement.shared=true", "weights.transport=tensor", "weights.interrupt=abort")


def test_both_sides_have_weights_in_a_hand_over_by_handles(config: Path, check: Check) -> None:
    """Three buckets and what is gathered are of the size of the embedding."""
    embedding = 2 * 151936 * 2048
    saved = ["trainer.layout.tp=8", "engine.num_engines=8"]
    rank = rank_of(config, *HANDED_OVER, *saved, "engine.tp_size=1")
    assert rank.moment == "hand-over"
    assert rank.parts["engine's weights"] == 2 * PARAMETERS
    assert rank.parts["buckets"] == 3 * embedding
    assert rank.parts["gathered"] == 2 * embedding
    assert not {"gradients", "optimizer"} & set(rank.parts)
    assert "buckets" not in rank.host
    found = rank_of(config, *HANDED_OVER, *saved, "engine.tp_size=2")
    assert found.moment != "hand-over"  # the engine's part of a GPU is half as large
    out = check(config, *HANDED_OVER, *saved, "engine.tp_size=1", gpu="78GB", code=2)
    assert change_in(out) == ["weights.transport=disk"]


@pytest.mark.parametrize(("senders", "sending"), [("1", [0]), ("2", [0, 4]), ("null", [0, 1, 4])])
def test_each_sender_has_two_buckets_on_its_device(config: Path, senders: str, sending: list[int]) -> None:
    """Of two stages of four ranks. Which ranks are the first on their hosts is not known before a run."""
    words = ["weights.transport=distributed", f"weights.senders={senders}", "trainer.layout={pp: 2, ep: 4}"]
    ranks = trainer.estimate_memory(load_config(config, words), cuda=True).ranks
    bucket = 2 * 151936 * 2048
    found = {rank.first: rank.moments.get("weight update", {}).get("buckets") for rank in ranks}
    assert found == {first: 2 * bucket if first in sending else None for first in (0, 1, 4)}


def test_a_copy_on_the_host_takes_no_device(config: Path) -> None:
    words = ["weights.transport=distributed", "weights.overlap=true"]
    for place, is_there in (("host", False), ("device", True)):
        rank, *_ = trainer.estimate_memory(
            load_config(config, [*words, f"weights.snapshot={place}"]), cuda=True
        ).ranks
        assert ("snapshot" in rank.moments["weight update"]) is is_there
        assert ("snapshot" in rank.host) is not is_there


def test_a_30b_model_on_eight_gpus_of_80_gb_is_refused_with_a_change_that_fits(
    config: Path, check: Check, capsys: pytest.CaptureFixture[str]
) -> None:
    out = check(config, code=2)
    # 18 bytes a parameter: 3.6 B of experts, and 1.5 B that all share, whose optimizer is divided by eight.
    assert "weights 10.3 GB, gradients 20.7 GB, optimizer 45.8 GB" in out
    assert "does not fit into 80GB: rank 0 by 5.92 GB" in out
    assert "fits into 80GB with" in check(config, *change_in(out))
    assert main(["plan", str(config), "--gpu", "80GB"]) == 2
    assert "does not fit into 80GB" in capsys.readouterr().out


def test_more_ranks_are_asked_for_when_no_other_layout_fits(config: Path) -> None:
    load = partial(load_config, config)
    changes = nearest_change(load, 24 * 10**9)
    assert changes is not None
    assert any(change.startswith("trainer.num_ranks=") for change in changes)
    assert nearest_change(load, 2 * 10**9) is None


@pytest.fixture
def judged(config: Path) -> Path:
    """The config with a judge: the same model, on one GPU."""
    tree = json.loads(config.read_text())
    tree["models"] = {"judge": {"path": tree["model"]["path"], "context_length": 4096}}
    config.write_text(json.dumps(tree))
    return config


def test_engines_of_further_models_are_estimated(judged: Path) -> None:
    *_, policy, judge = estimate_devices(load_config(judged), 80 * 10**9)
    assert (policy.name, judge.name) == ("engines 0-3, each of 2 GPUs", "models.judge engine")
    assert judge.parts["weights"] == 2 * PARAMETERS
    assert "routing" not in judge.parts  # only the policy's engines return it
    (judged.parent / "model" / "model.safetensors").write_bytes(bytes(1000))
    *_, judge = estimate_devices(load_config(judged), 80 * 10**9)
    assert judge.parts["weights"] == 1000


def test_further_models_that_do_not_fit_are_refused_with_a_change_that_fits(
    judged: Path, check: Check
) -> None:
    ranks = [*OFFLOADED, "engine.tp_size=8"]
    out = check(judged, *ranks, gpu="48GB", code=2)
    assert "does not fit into 48GB: models.judge engine by" in out
    assert change_in(out) == ["models.judge.tp_size=2"]
    check(judged, *ranks, "models.judge.tp_size=2", gpu="48GB")
    check(judged, *ranks, 'models.judge.urls=["http://judge:1"]', gpu="48GB")


MOMENTS = (
    "trainer.megatron.use_precision_aware_optimizer=true",
    "trainer.megatron.exp_avg_dtype=bfloat16",
    "trainer.megatron.exp_avg_sq_dtype=bfloat16",
)
OFFLOADED = (MOMENTS[0], "trainer.megatron.optimizer_cpu_offload=true")


def test_a_step_of_the_optimizer_takes_copies_of_one_slice_of_smaller_moments(config: Path) -> None:
    def step(*overrides: str) -> dict[str, int]:
        estimate = trainer.estimate_memory(load_config(config, overrides), cuda=True)
        return estimate.ranks[0].moments.get("optimizer step", {})

    assert step() == step(*OFFLOADED) == {}
    # TransformerEngine's own step would copy all: 8 bytes for each of 0.5 billion elements of a rank.
    ranks, of_slice = "trainer.num_ranks=64", 1 << 26
    assert tuple(step(*MOMENTS, ranks)) == ("weights", "gradients", "optimizer", "copies")
    assert step(*MOMENTS, ranks)["copies"] == of_slice * (4 + 4 + 2)
    assert step(*MOMENTS[:2], ranks)["copies"] == of_slice * (4 + 2)
    # The first step copies a parameter, at most the embedding as far as it is in a rank's part of all that
    # ranks share.
    dense = PARAMETERS - 48 * 128 * 3 * 2048 * 768
    assert step(MOMENTS[0], ranks)["copies"] == dense // 64 * (2 + 4)
    assert step(*MOMENTS)["copies"] == dense // 8 * (2 + 4) < 151936 * 2048 * (2 + 4)


def test_smaller_moments_and_an_optimizer_on_the_host_are_estimated(config: Path) -> None:
    plain = rank_of(config).parts["optimizer"]  # 12 bytes an element
    assert rank_of(config, *MOMENTS).parts["optimizer"] == pytest.approx(plain * 8 / 12)
    rank = rank_of(config, *OFFLOADED)
    assert rank.parts["optimizer"] == 0
    assert rank.host["optimizer"] == pytest.approx(plain * 16 / 12)  # and the gradients
    half = rank_of(config, *OFFLOADED, "trainer.megatron.optimizer_offload_fraction=0.5")
    assert half.parts["optimizer"] == pytest.approx(plain / 2)


def test_the_optimizer_goes_to_the_host_when_no_layout_fits(config: Path, check: Check) -> None:
    assert change_in(check(config, gpu="48GB", code=2)) == list(OFFLOADED)
    check(config, *OFFLOADED, gpu="48GB")


def test_the_reference_is_in_host_memory_and_changes_places_with_the_policy_tensor_by_tensor(
    config: Path,
) -> None:
    penalty = "trainer.loss.kl.coefficient=0.01"
    rank = rank_of(config, penalty)
    assert rank.host["reference"] == rank.parts["weights"]
    memory = trainer.estimate_memory(load_config(config, [penalty]), cuda=True)
    largest = QWEN3_30B["vocab_size"] * QWEN3_30B["hidden_size"] * 2
    assert memory.ranks[0].moments["reference"]["reference"] == largest


def test_inputs_of_layers_are_on_the_host_when_activations_are_offloaded(config: Path) -> None:
    rank = rank_of(config, "trainer.recompute=offload")
    inputs = 16384 * QWEN3_30B["hidden_size"] * 2
    assert rank.parts["activations"] == 0
    assert rank.host["activations"] == (QWEN3_30B["num_hidden_layers"] + 1) * inputs
    staged = ["trainer.recompute=offload", "trainer.layout.pp=4", "trainer.layout.ep=2"]
    (first, *_) = trainer.estimate_memory(load_config(config, staged), cuda=True).ranks
    assert first.moments["a layer"]["activations"] == 4 * inputs  # what it sent, of four micro-batches
    assert first.host["activations"] == 4 * 12 * inputs


def test_a_critic_takes_as_much_as_the_policy_without_its_output_layer(config: Path) -> None:
    parts = rank_of(config, "trainer.loss.advantages=gae").parts
    policy = sum(parts[name] for name in ("weights", "gradients", "optimizer"))
    output_layer = QWEN3_30B["vocab_size"] * QWEN3_30B["hidden_size"]
    assert parts["critic"] == pytest.approx(policy - output_layer * (2 + 4 + 12 / 8), rel=1e-4)


@pytest.mark.parametrize(
    ("overrides", "layers"),
    [
        ((), 48 + 48),  # of all layers as engines sent them, and a copy that is replayed
        (("routing.replay=r2",), 48),  # only what the rank recorded
        (("routing.replay=off",), None),
        # half of the layers or of the tokens, of twice as many trajectories
        (("trainer.layout.pp=2", "trainer.layout.ep=4"), 2 * (48 + 24)),
        (("trainer.layout.tp=2", "trainer.layout.ep=4"), 2 * (48 + 24)),
    ],
)
def test_routing_rows_of_a_batch_are_in_host_memory(
    config: Path, overrides: tuple[str, ...], layers: int | None
) -> None:
    rank = rank_of(config, *overrides)
    tokens = 64 * 8 // 8 * 16384  # of the trajectories of one of eight ranks
    assert rank.host.get("routing") == (None if layers is None else tokens * layers * 8)


def test_sizes_are_decimal_or_binary_as_they_say() -> None:
    assert parse_size("80GB") == 80 * 10**9
    assert parse_size("79.5 GiB") == int(79.5 * 2**30)
    with pytest.raises(ConfigError, match="'80' is not a size of memory; expected one such as 80GB"):
        parse_size("80")


# -- the parameters that memory is estimated from are those of the models -----------------------------


ROOT = Path(__file__).parents[2]

MODELS: dict[str, Any] = {
    "deepseek_v3": tiny_model.build_tiny_deepseek_v3,
    "glm4_moe": tiny_model.build_tiny_glm4_moe,
    "kimi_k2": tiny_model.build_tiny_kimi_k2,
    "llama": lambda path: tiny_model.build_tiny_dense(path, "llama"),
    "mixtral": tiny_model.build_tiny_mixtral,
    "qwen2": lambda path: tiny_model.build_tiny_dense(path, "qwen2"),
    "qwen2_moe": lambda path: tiny_model.build_tiny_qwen2_moe(path, dense_layers=(1,)),
    "qwen3": tiny_model.build_tiny_qwen3,
    "qwen3_moe": lambda path: tiny_model.build_tiny_qwen3_moe(path, dense_layers=(0,)),
}


def test_every_supported_type_is_tried() -> None:
    assert set(MODELS) == set(KNOWN_MODEL_TYPES)


@pytest.mark.parametrize("kind", MODELS)
def test_a_rank_alone_has_the_parameters_of_the_checkpoint(kind: str, tmp_path: Path) -> None:
    from safetensors import safe_open

    path = MODELS[kind](tmp_path / kind)
    with safe_open(path / "model.safetensors", "np") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - not a dict
    # A bias that only selects experts is a buffer.
    trained = [shape for name, shape in shapes.items() if not name.endswith("e_score_correction_bias")]
    numbers = [math.prod(shape) for shape in trained]
    parameters = parameters_of(dimensions_of(read_config(path)), LayoutConfig(), 0)
    assert sum(map(sum, parameters)) == sum(numbers)
    check_weights(path, load_facts(path))
    assert read_config(path)["architectures"] == [ARCHITECTURES[kind]]


@pytest.mark.parametrize("kind", ["qwen3_moe", "glm4_moe"])
def test_ranks_of_a_layout_have_all_parameters_together(kind: str, tmp_path: Path) -> None:
    config = read_config(MODELS[kind](tmp_path / kind)) | {"num_hidden_layers": 4}
    model = dimensions_of(config)
    layout = LayoutConfig(tp=2, pp=2, vpp=2, ep=2)
    whole = parameters_of(model, LayoutConfig(ep=2), 0)
    stages = [parameters_of(model, layout, stage) for stage in range(2)]
    # Experts are shared out over ep here; etp is 1, so tensor ranks do not divide them.
    assert sum(sum(stage.experts) for stage in stages) == sum(whole.experts)
    split = sum(sum(stage.dense) for stage in stages)
    assert sum(whole.dense) / 2 < split < sum(whole.dense)


def test_chunks_are_those_of_megatron() -> None:
    assert chunks_of(LayoutConfig(pp=2, vpp=2), 1, 8) == [range(2, 4), range(6, 8)]
    assert chunks_of(LayoutConfig(pp=3, first_stage_layers=1, last_stage_layers=2), 1, 7) == [range(1, 5)]
    assert chunks_of(LayoutConfig(pp=2, first_stage_layers=1), 1, 4) == [range(1, 4)]


def test_a_stage_keeps_as_many_micro_batches_as_its_schedule_runs_ahead() -> None:
    assert [in_flight(stage, 4, 1, 8) for stage in range(4)] == [[4], [3], [2], [1]]
    assert in_flight(0, 4, 1, 2) == [2]
    assert in_flight(0, 2, 2, 8) == [3, 2]
    assert in_flight(1, 2, 2, 8) == [2, 1]


@pytest.mark.parametrize(
    ("tp", "heads"),
    [
        # The projection's output; the norm's input, in the order of heads; rotated; results.
        (2, (16 + 2 * 2) + 16 + (16 + 2) + 16),
        # One group: its heads are in order.
        (4, (8 + 2) + (8 + 1) + 8),
        # Half a group: the projection's outputs of all ranks are gathered, 32 queries, 4 keys and 4 values.
        (8, (32 + 2 * 4) + (4 + 1) + 4),
    ],
)
def test_tensor_ranks_beyond_the_groups_keep_what_they_gather(tp: int, heads: int) -> None:
    source = ROOT / "tests" / "support" / "model_configs" / "qwen3_30b_a3b.json"
    model = dimensions_of(json.loads(source.read_text(encoding="utf-8")))
    assert (model.heads, model.groups) == (32, 4)
    part = activations.Slice(tokens=64, tp=tp, cp=1, etp=1, longest=64, element=2, fused=True)
    normalisers = 64 * 32 // tp * 4
    assert activations.attention_bytes(model, part) == 64 * heads * model.head * 2 + normalisers


# -- the memory of trajectories that `async-rl check` reports -----------------------------------------


QWEN = EngineFacts(
    num_layers=48,
    moe_layers=tuple(range(48)),
    num_experts=128,
    top_k=8,
    vocab_size=151936,
    context_length=40960,
)


def replaying(replay: str = "r3", **rollout: Any) -> Config:
    return config_with(f"routing.replay={replay}", rollout={"max_context_tokens": 32768, **rollout})


def test_rows_of_layers_with_experts_count_as_sent_and_before_and_after_a_merge() -> None:
    rows = math.ceil(3.05 * 48 * 8)
    assert trajectory_bytes(replaying(), QWEN) == 32768 * (rows + 48)
    assert trajectory_bytes(replaying(max_branches=3), QWEN) == 4 * 32768 * (rows + 48)
    assert trajectory_bytes(replaying(replay="off"), QWEN) == 32768 * 48
    some = msgspec.structs.replace(QWEN, moe_layers=tuple(range(3, 48)))
    assert trajectory_bytes(replaying(), some) == 32768 * (math.ceil(3.05 * 45 * 8) + 48)


def test_a_trajectory_whose_flips_are_measured_keeps_the_rows_of_each_version_when_they_are_spliced() -> None:
    config = replaying(max_staleness=5)
    routing = msgspec.structs.replace(config.routing, merge="splice", flip_sample=1.0)
    config = msgspec.structs.replace(config, routing=routing)
    assert trajectory_bytes(config, QWEN) == 32768 * ((3 + 6) * 48 * 8 + 48)


@pytest.mark.parametrize("num_calls", [1, 4])
def test_the_masks_of_a_truncated_distribution_fit_what_is_reported(num_calls: int) -> None:
    num_tokens, top_k = 4096, 64
    config = replaying(
        "off", max_context_tokens=num_tokens, top_k=top_k, top_p=0.99, max_concurrent_trajectories=1
    )
    per_chunk = SamplingMask.of([list(range(70_000, 70_000 + top_k))] * 8)
    tracemalloc.start()
    try:
        parts = []
        for _ in range(num_calls):
            call, length = GrowingMask(), num_tokens // num_calls
            for _ in range(0, length, len(per_chunk)):
                call.extend(per_chunk)
            parts.append(call.part(0, length))
        joined = SamplingMask.joined([*parts, SamplingMask.untruncated(1)])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(joined) == num_tokens + 1
    reported = trajectory_bytes(config, QWEN)
    assert reported / 2 < peak < reported


@pytest.mark.parametrize(
    ("workers", "found"),
    [
        (0, "at most 9.5 GiB in the driver: 256 of up to 38 MiB"),
        (1, "at most 9.5 GiB in each rollout worker: 256 of up to 38 MiB"),
        (2, "at most 9.5 GiB in each rollout worker: 256 of"),  # the other one may be missing
        (5, "at most 2.4 GiB in each rollout worker: 64 of"),
    ],
)
def test_each_worker_has_its_share_while_one_of_the_others_is_missing(workers: int, found: str) -> None:
    config = replaying(num_workers=workers, max_concurrent_trajectories=256)
    assert found in describe_memory(config, QWEN)
