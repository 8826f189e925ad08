"""TransformerEngine's Adam in slices: the bits of one whole step, with copies of one slice at a time."""

from __future__ import annotations

import re
import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.logits_memory import PeakBytes
from tests.support import fused_adam
from trainer.megatron.sliced_adam import slices, step_in_slices

ROOT = Path(__file__).parents[2]
SIZES = ((1000, 30, 7), (257,), (), (64, 64))
"""Elements of the parameters of each group."""
MOMENTS = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}


def test_the_optimizer_under_test_is_the_one_that_is_installed_on_gpus() -> None:
    pins = [(ROOT / f"requirements/{name}.txt").read_text(encoding="utf-8") for name in ("gpu", "sources")]
    versions = [re.findall(r"^transformer-engine(?:\[.+\])?==(\S+)", text, re.MULTILINE) for text in pins]
    assert versions[0] == versions[1] != []


def build(adam: Any, *, most: int | None, seed: int = 0, **options: Any) -> Any:
    """Return an optimizer of flat parameters in bfloat16, as Megatron makes it; None: not in slices."""
    torch.manual_seed(seed)
    groups = [
        {
            "params": [torch.randn(size).bfloat16() for size in sizes],
            "weight_decay": 0.1 * number,
            "lr": 1e-2 / (1 + number),
        }
        for number, sizes in enumerate(SIZES)
    ]
    optimizer = adam(
        groups, betas=(0.9, 0.95), master_weights=True, use_decoupled_grad=True, **(MOMENTS | options)
    )
    if most is not None:
        step_in_slices(optimizer, most)
    return optimizer


def params_of(optimizer: Any) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def give_gradients(optimizer: Any, step: int, *, without: int | None = None) -> None:
    generator = torch.Generator().manual_seed(step)
    for number, param in enumerate(params_of(optimizer)):
        gradient = torch.randn(param.shape, generator=generator)
        param.decoupled_grad = None if number == without else gradient


def everything(optimizer: Any) -> dict[str, torch.Tensor]:
    """Return parameters, states and counts, by names that say their order and types."""
    found = {}
    for number, param in enumerate(params_of(optimizer)):
        named = {"param": param} | optimizer.state[param]
        found |= {f"{number} {name} {tensor.dtype}": tensor.clone() for name, tensor in named.items()}
    for number, group in enumerate(optimizer.param_groups):
        found[f"group {number}, {len(group['params'])} params"] = torch.tensor(group.get("step", 0))
    return found


def differing(one: Any, other: Any) -> list[str]:
    found, wanted = everything(one), everything(other)
    assert list(found) == list(wanted)
    return [name for name in found if not torch.equal(found[name], wanted[name])]


@pytest.mark.parametrize("most", [1, 7, 64, 1000, 1 << 20])
def test_steps_are_those_of_the_whole_optimizer_bit_for_bit(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    adam = fused_adam.fused_adam(monkeypatch)
    whole, sliced = build(adam, most=None), build(adam, most=most)
    before = everything(whole)
    for step in range(1, 4):
        for optimizer in (whole, sliced):
            give_gradients(optimizer, step, without=1 if step == 2 else None)
            optimizer.step()
        assert differing(sliced, whole) == []
        assert [group.get("step") for group in sliced.param_groups] == [step, step, None, step]
        assert set(sliced.state) == set(params_of(sliced)) == set(sliced._scales)
    assert any(not torch.equal(before[name], tensor) for name, tensor in everything(whole).items())


def test_a_restored_optimizer_goes_on_at_the_count_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    adam = fused_adam.fused_adam(monkeypatch)
    whole, sliced = build(adam, most=None), build(adam, most=100)
    for optimizer in (whole, sliced):
        for param in params_of(optimizer):
            optimizer.initialize_state(param, store_param_remainders=False)
        for group in optimizer.param_groups:
            group["step"] = 41
        give_gradients(optimizer, 42)
        optimizer.step()
    assert differing(sliced, whole) == []
    assert sliced.param_groups[0]["step"] == 42


def test_float32_copies_of_one_slice_are_alive_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without slices they are of all moments of a group."""
    copies: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def count(chunk: int, flag: torch.Tensor, tensors: list[list[torch.Tensor]], *rest: Any) -> None:
        copies.extend(weakref.ref(moment) for moments in tensors[2:4] for moment in moments)
        alive.append(sum(moment.numel() for each in copies if (moment := each()) is not None))
        fused_adam.multi_tensor_adam(chunk, flag, tensors, *rest)

    adam = fused_adam.fused_adam(monkeypatch, count)
    for most, wanted in ((None, 2 * max(sum(sizes) for sizes in SIZES)), (100, 2 * 100)):
        optimizer = build(adam, most=most)
        for step in (1, 2):
            alive.clear()
            give_gradients(optimizer, step)
            optimizer.step()
            assert max(alive) == wanted


@pytest.mark.parametrize("smaller", [2, 1])
def test_a_step_takes_no_more_than_is_estimated(smaller: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of the moments of a slice, and one in their own type; in the first step those of a parameter."""
    adam = fused_adam.fused_adam(monkeypatch, lambda *_: None)
    options = {} if smaller == 2 else {"exp_avg_sq_dtype": torch.float32}
    optimizer = build(adam, most=100, **options)
    give_gradients(optimizer, 1)
    with PeakBytes() as first:
        optimizer.step()
    assert first.peak - first.alive <= (2 + 4) * 1000
    with PeakBytes() as later:
        optimizer.step()
    assert later.peak == smaller * 4 * 100 + 2 * 100
    assert later.alive == 0


def test_an_optimizer_whose_moments_are_float32_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    adam = fused_adam.fused_adam(monkeypatch)
    optimizer = build(adam, most=10, exp_avg_dtype=torch.float32, exp_avg_sq_dtype=torch.float32)
    torch_adam = torch.optim.AdamW([torch.zeros(3)])
    step_in_slices(torch_adam)
    for each in (optimizer, torch_adam):
        assert "step" not in vars(each)


def test_slices_cover_each_element_once_in_order() -> None:
    params = [torch.empty(size) for size in (5, 0, 3, 12, 1)]
    found = list(slices(params, 4))
    assert [sum(stop - start for _, start, stop in ranges) for ranges in found] == [4, 4, 4, 4, 4, 1]
    ranges = [each for part in found for each in part]
    for (param, _, stop), (following, start, _) in pairwise(ranges):
        assert start == (stop if following is param else 0)
        assert following is param or stop == param.numel()
    assert sum(stop - start for _, start, stop in ranges) == 21
