import hashlib

import pytest
import torch

from async_rl.weights.checksums import ChecksumComparison
from trainer.weights.checksums import checksum_parameters, sum_tensors

A, B = ({"norm": "1", "qkv": "2"},), ({"norm": "1", "qkv": "3"},)
SHARDED = ({"norm": "1", "qkv": "8"}, {"norm": "1", "qkv": "9"})


def sha(*tensors: torch.Tensor) -> str:
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest()[:16]


def test_engines_agree_when_their_sums_are_equal():
    comparison = ChecksumComparison()
    assert comparison.report_sums("a", 1, A, from_files=False) == {}
    assert comparison.report_sums("b", 1, A, from_files=False) == {}
    assert comparison.report_sums("a", 2, B, from_files=False) == {}


def test_the_later_one_is_named_when_two_differ_and_neither_has_files():
    comparison = ChecksumComparison()
    comparison.report_sums("a", 1, A, from_files=False)
    assert comparison.report_sums("b", 1, B, from_files=False) == {
        "b": "qkv of rank 0 sums to 3, and to 2 on a",
    }


def test_those_that_differ_from_files_are_named_when_an_engine_has_loaded_them():
    comparison = ChecksumComparison()
    comparison.report_sums("a", 1, B, from_files=False)
    comparison.report_sums("c", 1, B, from_files=False)
    assert set(comparison.report_sums("b", 1, A, from_files=True)) == {"a", "c"}
    assert comparison.report_sums("a", 1, A, from_files=True) == {}
    assert set(comparison.report_sums("c", 1, B, from_files=True)) == {"c"}


def test_nothing_is_found_when_an_engine_was_overtaken_while_it_loaded():
    comparison = ChecksumComparison()
    comparison.report_sums("a", 2, A, from_files=False)
    assert comparison.report_sums("b", 1, B, from_files=True) == {}
    assert set(comparison.report_sums("c", 2, B, from_files=False)) == {"c"}


def test_engines_of_another_layout_are_not_compared():
    comparison = ChecksumComparison()
    comparison.report_sums("a", 1, A, from_files=True)
    assert comparison.report_sums("b", 1, SHARDED, from_files=False) == {}


def test_the_trainer_counts_where_its_sums_were_the_engines_at_the_start():
    comparison = ChecksumComparison()
    comparison.expect_sums(0, {"norm": "1", "qkv": "cast to another dtype", "of trainer only": "0"})
    assert comparison.report_sums("a", 0, A, from_files=True) == {}
    comparison.expect_sums(1, {"norm": "5", "qkv": "cast"})
    assert comparison.report_sums("a", 1, ({"norm": "5", "qkv": "6"},), from_files=False) == {}
    assert comparison.report_sums("b", 1, A, from_files=True) == {
        "b": "norm sums to 1, and to 5 in the trainer",
    }


def test_nothing_is_held_against_the_trainer_when_it_could_not_be_compared_at_the_start():
    comparison = ChecksumComparison()
    comparison.expect_sums(1, {"norm": "5"})
    assert comparison.report_sums("a", 1, A, from_files=False) == {}


@pytest.mark.parametrize("bias", ["weight", "bias"])
def test_sums_are_those_of_fused_parameters_when_tensors_come_in_the_engines_order(bias):
    parts = {name: torch.randn(3, 2) for name in ("q", "k", "v")}
    prefix = "model.layers.0.self_attn."
    sums = checksum_parameters((f"{prefix}{name}_proj.{bias}", tensor) for name, tensor in parts.items())
    assert sums == {f"{prefix}qkv_proj.{bias}": sha(*parts.values())}


def test_experts_are_summed_as_two_parameters_when_they_come_one_by_one():
    tensors = {
        f"m.experts.{e}.{name}_proj.weight": torch.randn(2, 2)
        for e in (0, 1)
        for name in ("gate", "up", "down")
    }
    t = list(tensors.values())
    assert checksum_parameters(tensors.items()) == {
        "m.experts.w13_weight": sha(t[0], t[1], t[3], t[4]),
        "m.experts.w2_weight": sha(t[2], t[5]),
    }


def test_rows_of_zeros_fill_the_vocabulary_up_when_it_is_no_multiple_of_64():
    head, full = torch.randn(70, 2), torch.randn(128, 2)
    assert checksum_parameters([("lm_head.weight", head), ("model.embed_tokens.weight", full)]) == {
        "lm_head.weight": sha(head, torch.zeros(58, 2)),
        "model.embed_tokens.weight": sha(full),
    }


def test_a_tensor_keeps_its_name_when_nothing_is_fused():
    norm = torch.randn(4).bfloat16()
    assert checksum_parameters([("model.norm.weight", norm)]) == {
        "model.norm.weight": sha(norm.view(torch.uint8))
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_sum_on_the_device_tells_that_one_bit_has_changed(dtype: torch.dtype) -> None:
    tensor = torch.linspace(-1, 1, 96).to(dtype).reshape(8, 12)
    before = sum_tensors([("w", tensor), ("v", tensor.T)])
    assert before["bits of w"] == before["bits of v"]
    assert before == sum_tensors([("w", tensor.clone()), ("v", tensor.clone())])
    changed = tensor.clone()
    changed.view(torch.uint8)[3, 2] ^= 1
    after = sum_tensors([("w", changed), ("v", tensor)])
    assert after["bits of w"] != before["bits of w"]
    assert after["bits of v"] == before["bits of v"]
