"""Adapters: equal to weights with the adapter merged, the same in every layout, checkpoint and export."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from async_rl.cli.main import main
from async_rl.errors import CheckpointError
from tests.support.emulated_layers import spawn_with_transformer_engine
from tests.support.layer_specs import layers_of
from tests.support.ranks import run_ranks
from tests.support.tiny_model import (
    build_tiny_deepseek_v3,
    build_tiny_mixtral,
    build_tiny_qwen2_moe,
)
from tests.support.train_batches import random_batch
from tests.support.trainers import (
    differing,
    gathered_gradients,
    gradients_as_weights,
    log_probs_of,
    started,
    trainer_config,
    training_state,
    trial,
)
from trainer.megatron.lora import adapted_weights
from trainer.weights.adapter_export import PREFIX, export_adapter

pytestmark = [pytest.mark.real, pytest.mark.megatron, pytest.mark.timeout(900)]

LORA = {"rank": 4, "alpha": 10, "targets": ["attention", "mlp", "experts"]}
SCALE = 2.5


def build_latent(path: Path, **config) -> Path:
    """A DeepSeek-V3 with as many experts as other models here; the first layer is dense."""
    return build_tiny_deepseek_v3(path, num_experts=8, top_k=2, num_groups=1, top_groups=1, **config)


MODELS = {
    "dense and shared experts": lambda path: build_tiny_qwen2_moe(path, dense_layers=(0,)),
    "mixtral": build_tiny_mixtral,
    "latent attention": build_latent,
    "latent attention, whole queries": lambda path: build_latent(path, q_lora_rank=None),
}

WHOLE_LAYOUTS = {
    "tensor, sequence and expert": (2, {"tp": 2, "ep": 2}, "full"),
    "interleaved pipeline": (2, {"pp": 2, "vpp": 2}, "none"),
    "tensor and sequence": (2, {"tp": 2, "etp": 2}, "selective"),
    "data": (2, {}, "none"),
    "expert": (2, {"ep": 2}, "full"),
    "context": (2, {"cp": 2}, "none"),
    "four: tensor, expert and expert tensor": (4, {"tp": 2, "ep": 2, "etp": 2}, "none"),
    "four: tensor, pipeline and expert": (4, {"tp": 2, "pp": 2, "ep": 2}, "full"),
}
"""Ranks, what they share out, and what they recompute."""

LAYOUTS = WHOLE_LAYOUTS | {f"latent: {name}": layout for name, layout in WHOLE_LAYOUTS.items()}
"""`latent`: of a model with latent attention."""

ROUNDED = 3e-4
"""Of weights after steps: Adam divides gradients by their size, also where they are rounding errors."""

OF_REAL_LANE = ("tensor, sequence and expert", "interleaved pipeline")
"""The layouts of `make test-real`; `make test-long` has the rest."""


def model_of(path: Path, *, latent: bool = False) -> Path:
    """Of four layers the first is dense: interleaved, one chunk has no experts."""
    if latent:
        return build_latent(path, num_layers=4)
    return build_tiny_qwen2_moe(path, num_layers=4, dense_layers=(0,))


def config_of(model: Path, **trainer):
    """Engines cannot serve adapters of each model here."""
    lora = {**LORA, "sync": "merged", **trainer.pop("lora", {})}
    return plain_config(model, **trainer, lora=lora)


def plain_config(model: Path, **trainer):
    """Gradients are compared before they are clipped."""
    return trainer_config(model, optimizer={"lr": 1e-3, "clip_grad": 1e6}, **trainer)


def batch_of(seed: int = 0):
    return random_batch(seed, layers=(1, 2, 3), lengths=(13, 7, 30, 19, 5, 22, 37), group_size=7)


def randomise(worker) -> None:
    """Give each B values, the same in every layout: A has a gradient then."""
    for each in adapted_weights(worker.model.chunks):
        ranks, rank = each.tensor_group.size(), each.tensor_group.rank()
        rows = len(each.b) * (ranks if each.split == "columns" else 1)
        seed = int.from_bytes(each.name.encode()[-24:], "big") % (1 << 60)
        whole = torch.randn(rows, each.b.shape[1], generator=torch.Generator().manual_seed(seed)) / 20
        if each.split == "columns":
            gated = 2 if each.name.endswith("linear_fc1") else 1
            whole = torch.cat([part.chunk(ranks)[rank] for part in whole.chunk(gated)])
        each.b.data.copy_(whole)
    for part in getattr(worker.model.optimizer, "chained_optimizers", []):
        part.reload_model_params()


def factors(worker) -> dict[str, torch.Tensor]:
    """The adapter under PEFT's names, on rank 0; collective."""
    return {name: t.clone() for name, t in export_adapter(worker.model.chunks, worker.model.bridge)}


def factor_gradients(worker) -> dict[str, torch.Tensor]:
    with gradients_as_weights(worker.model):
        return factors(worker)


def close(found, wanted, tolerance):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        bound = tolerance * max(1e-3, float(value.abs().max()))
        assert float((found[name] - value).abs().max()) <= bound, name


# -- one rank


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.long if "," in k or k == "mixtral" else ()) for k in MODELS]
)
def test_a_model_with_adapters_is_the_one_whose_weights_have_them_merged(kind: str, tmp_path: Path) -> None:
    model = MODELS[kind](tmp_path / "model")
    targets = ["attention", "experts"] if kind == "mixtral" else LORA["targets"]
    layers = 2 if kind == "mixtral" else (1, 2)
    batch = random_batch(layers=layers)
    with started(config_of(model, lora={"targets": targets})) as worker:
        plain = log_probs_of(worker, batch)
        randomise(worker)
        with trial(worker, config_of(model, lora={"targets": targets})):
            result = worker.train_on(batch, 1)
        adapted, own = log_probs_of(worker, batch), factor_gradients(worker)
        values = factors(worker)
        worker.model.bridge.save_hf(worker.model.chunks, tmp_path / "merged")
    assert np.abs(adapted - plain).max() > 1e-2, "the adapters have an effect"
    with started(plain_config(tmp_path / "merged")) as worker:
        with trial(worker, plain_config(tmp_path / "merged")):
            merged = worker.train_on(batch, 1)
        np.testing.assert_allclose(log_probs_of(worker, batch), adapted, rtol=0, atol=1e-5)
        of_weights = {name: gradient.detach() for name, gradient in gathered_gradients(worker).items()}
    assert result.metrics["loss"] == pytest.approx(merged.metrics["loss"], abs=1e-5)
    projections = {name.removesuffix(".lora_A.weight") for name in own if ".lora_A" in name}
    layer_of = lambda name: name.rpartition(".")[0]  # noqa: E731
    wanted: dict[str, torch.Tensor] = {}
    for name in projections:
        a, b = values[f"{name}.lora_A.weight"], values[f"{name}.lora_B.weight"]
        of_weight = of_weights[f"{name.removeprefix(PREFIX)}.weight"]
        wanted[f"{name}.lora_B.weight"] = SCALE * of_weight @ a.t()
        wanted[f"{name}.lora_A.weight"] = SCALE * b.t() @ of_weight
    for name in projections:  # projections in one have one A, whose gradient is of all of them
        siblings = [
            each
            for each in projections
            if layer_of(each) == layer_of(name)
            and torch.equal(values[f"{each}.lora_A.weight"], values[f"{name}.lora_A.weight"])
        ]
        if name == min(siblings):
            total = sum(wanted[f"{each}.lora_A.weight"] for each in siblings)
            wanted |= {f"{each}.lora_A.weight": total for each in siblings}
    close(own, wanted, 1e-5)
    # What projections share counts once.
    unique = {tuple(gradient.flatten()[:8].tolist()): gradient for gradient in own.values()}
    norm = sum(float(gradient.square().sum()) for gradient in unique.values()) ** 0.5
    assert result.metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_only_adapters_are_trained_and_have_gradients_and_optimizer_state(tmp_path: Path) -> None:
    model = model_of(tmp_path / "model")
    with started(config_of(model)) as worker:
        chunk = worker.model.chunks[0]

        def frozen() -> dict[str, torch.Tensor]:
            return {n: p.detach().clone() for n, p in chunk.named_parameters() if ".lora." not in n}

        before = frozen()
        stored, merged = load_file(model / "model.safetensors"), weights_merged(worker)
        assert not differing(merged, {name: stored[name] for name in merged})
        worker.train_on(batch_of(), 1)
        worker.train_on(batch_of(1), 2)
        assert not differing(frozen(), before)
        trained = {id(p): p for name, p in chunk.named_parameters() if ".lora." in name}
        assert {id(p) for p in chunk.parameters() if p.requires_grad} == trained.keys()
        elements = sum(p.numel() for p in trained.values())
        buffers = [*chunk.buffers, *chunk.expert_parallel_buffers]
        assert sum(buffer.grad_data.numel() for buffer in buffers) < 1.2 * elements
        held = [
            p
            for inner in worker.model.inner_optimizers
            for group in inner.param_groups
            for p in group["params"]
        ]
        assert sum(p.numel() for p in held) == elements
        assert not any(
            hasattr(p, "main_grad") or p.grad is not None for p in chunk.parameters() if id(p) not in trained
        )
        assert len(differing(weights_merged(worker), merged)) == 4 * 4 + 3 + 3 * 3 + 3 * 3 * 8


def test_the_reference_policy_is_the_model_without_adapters(tmp_path: Path) -> None:
    model = model_of(tmp_path / "model")
    config = config_of(model, replay=False, loss={"kl": {"coefficient": 0.1, "estimator": "k2"}})
    batch = batch_of()
    with started(config) as worker:
        first = worker.train_on(batch, 1)
        assert first.metrics["reference_kl"] == 0
        randomise(worker)
        with_adapter = log_probs_of(worker, batch)
        with worker.model.as_reference():
            reference = log_probs_of(worker, batch)
        np.testing.assert_array_equal(log_probs_of(worker, batch), with_adapter)
    with started(trainer_config(model, replay=False)) as worker:
        np.testing.assert_array_equal(log_probs_of(worker, batch), reference)
    assert np.abs(reference - with_adapter).max() > 1e-2


# -- layouts


def look(config: dict, checkpoints: Path, *, rank: int = 0, meeting: Path | None = None) -> dict:
    with_reference = config | {"trainer": config["trainer"] | {"loss": {"kl": {"coefficient": 1.0}}}}
    found: dict = {}
    with started(config, rank=rank, meeting=meeting) as worker:
        found["drawn"] = factors(worker)
        randomise(worker)
        found["merged"] = weights_merged(worker)
        first = worker.train_on(batch_of(), 1)
        found["gradients"] = factor_gradients(worker)
        with trial(worker, with_reference):
            found["reference"] = worker.train_on(batch_of(), 1).metrics["reference_kl"]
        worker.train_on(batch_of(1), 2)
        worker.save_checkpoint(str(checkpoints), {})
        assert worker.saved_checkpoint(wait=True).failure is None
        found["trained"], state = factors(worker), training_state(worker)
    again = meeting and meeting.with_name(f"{meeting.name} again")
    with started(config, checkpoints, rank=rank, meeting=again) as worker:
        resumed = zip(training_state(worker), state, strict=True)
        found["resumed"] = all(torch.equal(*pair) for pair in resumed)
        third = worker.train_on(batch_of(2), 3)
        found["continued"] = factors(worker)
    return found | {"metrics": [first.metrics, third.metrics]}


def weights_merged(worker) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in worker.model.bridge.export_hf(worker.model.chunks)}


def run_rank(rank: int, models: dict[bool, Path], out: Path, names: list[str]) -> dict[str, dict]:
    found = {}
    for name in names:
        ranks, layout, recompute = LAYOUTS[name]
        model = models[is_latent(name)]
        config = config_of(model, num_ranks=ranks, layout=layout, recompute=recompute, micro_batch_tokens=36)
        found[name] = look(config, out / f"checkpoints {name}", rank=rank, meeting=out / name)
    return found


def is_latent(name: str) -> bool:
    return name.startswith("latent: ")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """By whether their attention is latent."""
    folder = tmp_path_factory.mktemp("models")
    return {latent: model_of(folder / f"latent {latent}", latent=latent) for latent in (False, True)}


@pytest.fixture(scope="module")
def one(models, tmp_path_factory):
    """What one rank finds, by model."""
    out = tmp_path_factory.mktemp("one")

    @cache
    def of_model(latent: bool) -> dict:
        return look(config_of(models[latent], micro_batch_tokens=36), out / f"checkpoints {latent}")

    return of_model


@pytest.fixture(scope="module")
def seen(models, request, tmp_path_factory):
    names = {
        item.callspec.params["name"]
        for item in request.session.items
        if "name" in getattr(getattr(item, "callspec", None), "params", {}) and item.module is request.module
    }
    out = tmp_path_factory.mktemp("layouts")
    found = {}
    for ranks in (2, 4):
        if chosen := [name for name in LAYOUTS if name in names and LAYOUTS[name][0] == ranks]:
            of_ranks = run_ranks(run_rank, models, out, chosen, ranks=ranks)
            found |= {name: [rank[name] for rank in of_ranks] for name in chosen}
    return out, found


EACH_LAYOUT = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in OF_REAL_LANE else pytest.mark.long) for n in LAYOUTS]
)


@EACH_LAYOUT
def test_adapters_of_a_layout_are_those_of_one_rank(one, seen, name: str) -> None:
    wanted, found = one(is_latent(name)), seen[1][name][0]
    for key in ("drawn", "merged"):
        assert not differing(found[key], wanted[key]), key
    close(found["gradients"], wanted["gradients"], 1e-5)
    close(found["trained"], wanted["trained"], ROUNDED)
    close(found["continued"], wanted["continued"], ROUNDED)
    for mine, theirs in zip(found["metrics"], wanted["metrics"], strict=True):
        for metric in ("grad_norm", "loss"):
            assert mine[metric] == pytest.approx(theirs[metric], rel=1e-5, abs=1e-6)
        assert mine["old_log_prob_abs_diff"] == 0, "rows are replayed as recorded"
    assert found["reference"] == pytest.approx(wanted["reference"], rel=1e-4)


@EACH_LAYOUT
def test_a_checkpoint_of_adapters_is_resumed_bit_for_bit_and_under_another_layout(
    models, one, seen, name: str
) -> None:
    model, wanted = models[is_latent(name)], one(is_latent(name))
    out, by_name = seen
    assert all(each["resumed"] for each in by_name[name])
    checkpoints = Path(f"{out}/checkpoints {name}")
    with started(config_of(model, micro_batch_tokens=36), checkpoints) as worker:
        assert not differing(factors(worker), by_name[name][0]["trained"])
        worker.train_on(batch_of(2), 3)
        close(factors(worker), wanted["continued"], ROUNDED)


# -- layers of TransformerEngine, emulated


def compare_specs(rank: int, model: Path, out: Path) -> None:
    """Take the same steps with both layer specs; experts are grouped in that of TransformerEngine."""
    torch.set_num_threads(1)
    config, found = config_of(model, dtype="bfloat16"), {}
    for spec in ("local", "transformer_engine"):
        with layers_of(spec), started(config) as worker:
            grouped = any(
                "linear_fc1.lora.a.weight0" in n for n, _ in worker.model.chunks[0].named_parameters()
            )
            randomise(worker)
            batch = random_batch(layers=(1, 2, 3))  # replayed: rounding chooses no other expert
            found[spec] = {"grouped": grouped, "log_probs": log_probs_of(worker, batch)}
            found[spec]["norm"] = worker.train_on(batch, 1).metrics["grad_norm"]
            found[spec] |= {"gradients": factor_gradients(worker), "trained": factors(worker)}
            worker.save_checkpoint(str(out / spec), {})
            assert worker.saved_checkpoint(wait=True).failure is None
    for spec, other in (("local", "transformer_engine"), ("transformer_engine", "local")):
        with layers_of(spec), started(config, out / other) as worker:
            found[spec]["loaded"] = factors(worker)
    torch.save(found, out / "found")


@pytest.mark.long
@pytest.mark.parametrize("latent", [False, True])
def test_adapters_are_the_same_with_the_layers_of_transformer_engine(
    models, latent: bool, tmp_path: Path
) -> None:
    spawn_with_transformer_engine(compare_specs, models[latent], tmp_path)
    found = torch.load(tmp_path / "found", weights_only=False)
    local, fused = found["local"], found["transformer_engine"]
    assert (local["grouped"], fused["grouped"]) == (False, True)
    # Sums of adapters and products are rounded at other places.
    np.testing.assert_allclose(fused["log_probs"], local["log_probs"], rtol=0, atol=0.05)
    assert fused["norm"] == pytest.approx(local["norm"], rel=0.02)
    assert fused["gradients"].keys() == local["gradients"].keys()
    apart = [
        float(torch.linalg.norm(fused["gradients"][name] - gradient) / torch.linalg.norm(gradient))
        for name, gradient in local["gradients"].items()
        if torch.linalg.norm(gradient) > 0
    ]
    assert max(apart) < 0.3  # in bfloat16
    assert sum(apart) / len(apart) < 0.1
    for mine, others in ((local, fused), (fused, local)):
        assert not differing(mine["loaded"], others["trained"])


# -- versions, checkpoints and exports


def test_a_version_is_a_folder_of_peft_or_merged_weights_and_an_export_is_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_of(tmp_path / "model")
    for sync in ("adapter", "merged"):
        with started(config_of(model, lora={"sync": sync})) as worker:
            before = worker.checksums()
            worker.train_on(batch_of(), 1)
            assert worker.checksums() != before
            worker.publish(str(tmp_path / sync), 1)
            worker.publish(str(tmp_path / sync), 1)  # a second time, in its place
            worker.take_snapshot(1)
            worker.train_on(batch_of(1), 2)
            worker.publish(str(tmp_path / f"{sync} of the snapshot"), 1)
            values = factors(worker)
            worker.save_checkpoint(str(tmp_path / f"checkpoints {sync}"), {})
            assert worker.saved_checkpoint(wait=True).failure is None
            last = weights_merged(worker)
    for sync, file in (("adapter", "adapter_model.safetensors"), ("merged", "model.safetensors")):
        first, copied = (load_file(tmp_path / f / file) for f in (sync, f"{sync} of the snapshot"))
        assert not differing(first, copied)
    published = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (settings["peft_type"], settings["r"], settings["lora_alpha"]) == ("LORA", 4, 10)
    modules = {name.removeprefix(PREFIX).split(".")[-3] for name in published}
    assert settings["target_modules"] == sorted(modules)
    base, whole = load_file(model / "model.safetensors"), load_file(tmp_path / "merged" / "model.safetensors")
    for name in (name for name in published if ".lora_A" in name):
        a, b = published[name], published[name.replace("lora_A", "lora_B")]
        weight = name.removeprefix(PREFIX).replace(".lora_A.weight", ".weight")
        expected = base[weight].double() + SCALE * (b.double() @ a.double())
        torch.testing.assert_close(whole[weight], expected.float(), rtol=0, atol=1e-6)
    for words, out in (([], "exported"), (["--adapter"], "exported adapter")):
        given = ["--checkpoint", str(tmp_path / "checkpoints merged"), "--out", str(tmp_path / out)]
        assert main(["export", *given, *words]) == 0
    assert "the adapter of step 2" in capsys.readouterr().out
    assert not differing(load_file(tmp_path / "exported" / "model.safetensors"), last)
    assert not differing(load_file(tmp_path / "exported adapter" / "adapter_model.safetensors"), values)


def test_a_checkpoint_is_refused_when_the_run_has_other_adapters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = build_tiny_mixtral(tmp_path / "model")
    lora = {"targets": ["attention"]}
    for name, config in (("adapters", config_of(model, lora=lora)), ("weights", plain_config(model))):
        with started(config) as worker:
            worker.save_checkpoint(str(tmp_path / name), {})
            assert worker.saved_checkpoint(wait=True).failure is None
    for name, config, words in (
        ("adapters", plain_config(model), "only adapters, of rank 4, alpha 10, .* is null"),
        ("weights", config_of(model, lora=lora), "all weights and no adapters, and .* is rank 4"),
        ("adapters", config_of(model, lora=lora | {"alpha": 8}), "is rank 4, alpha 8, .* set it back"),
    ):
        with pytest.raises(CheckpointError, match=words), started(config, tmp_path / name):
            pass
    given = ["--checkpoint", str(tmp_path / "weights"), "--out", str(tmp_path / "out"), "--adapter"]
    assert main(["export", *given]) == 2
    assert "holds all weights and no adapter" in capsys.readouterr().err
