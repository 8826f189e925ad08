import hashlib

import pytest
import torch

from async_rl.weights.checksums import ChecksumComparison
from trainer.weights.checksums import checksum_parameters, sum_tensors

A, B = ({"norm": "1", "qkv": "2"},), ({"norm": "1", "qkv": "3"},)
SHARDED = ({"norm": "1", "qkv": "8"}, {"norm": "1", "qkv": "9"})


def sha(*tensors: torch.Tensor) -> str:
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest()[:16]


@pytest.mark.parametrize(
    ("reports", "wrong"),  # (engine, version, sums, whether it has loaded files), the last one's findings
    [
        ([("a", 1, A, False), ("b", 1, A, False)], set()),
        ([("a", 1, A, False), ("a", 2, B, False)], set()),
        ([("a", 1, A, False), ("b", 1, B, False)], {"b"}),  # neither has files
        ([("a", 1, B, False), ("c", 1, B, False), ("b", 1, A, True)], {"a", "c"}),
        ([("a", 1, B, False), ("b", 1, A, True), ("a", 1, A, True)], set()),
        ([("a", 1, B, False), ("b", 1, A, True), ("c", 1, B, False)], {"c"}),
        ([("a", 2, A, False), ("b", 1, B, True)], set()),  # b was overtaken while it loaded
        ([("a", 2, A, False), ("b", 1, B, True), ("c", 2, B, False)], {"c"}),
        ([("a", 1, A, True), ("b", 1, SHARDED, False)], set()),  # of another layout
    ],
    ids=range(9),
)
def test_engines_that_differ_from_files_or_from_an_earlier_one_are_named(reports, wrong):
    comparison = ChecksumComparison()
    for engine, version, sums, from_files in reports:
        found = comparison.report_sums(engine, version, sums, from_files=from_files)
    assert set(found) == wrong
    if wrong == {"b"}:
        assert found == {"b": "qkv of rank 0 sums to 3, and to 2 on a"}


def test_engines_are_compared_again_when_the_trainer_has_gone_back():
    comparison = ChecksumComparison()
    comparison.expect_sums(1, {})
    assert comparison.report_sums("a", 1, A, from_files=True) == {}
    comparison.expect_sums(2, {})
    assert comparison.report_sums("a", 2, B, from_files=False) == {}
    comparison.expect_sums(1, {})
    assert comparison.report_sums("a", 1, A, from_files=False) == {}
    assert set(comparison.report_sums("b", 1, B, from_files=False)) == {"b"}


def test_the_trainer_counts_where_its_sums_were_the_engines_at_the_start():
    comparison = ChecksumComparison()
    comparison.expect_sums(0, {"norm": "1", "qkv": "cast to another dtype", "of trainer only": "0"})
    assert comparison.report_sums("a", 0, A, from_files=True) == {}
    comparison.expect_sums(1, {"norm": "5", "qkv": "cast"})
    assert comparison.report_sums("a", 1, ({"norm": "5", "qkv": "6"},), from_files=False) == {}
    assert comparison.report_sums("b", 1, A, from_files=True) == {
        "b": "norm sums to 1, and to 5 in the trainer",
    }
    comparison = ChecksumComparison()  # it could not be compared at the start
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
