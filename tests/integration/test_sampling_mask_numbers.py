"""The proof by numbers: log-probs of truncated sampling on a real SGLang server and in Megatron-Core."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from async_rl.engine_protocol import SamplingParams
from benchmarks import sampling_mask

pytestmark = [
    pytest.mark.real,
    pytest.mark.sglang,
    pytest.mark.megatron,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:::megatron"),
]


@pytest.mark.parametrize("model", ["qwen3_moe", pytest.param("deepseek_v3", marks=pytest.mark.long)])
def test_log_probs_are_the_engines_when_the_kept_tokens_are_replayed(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = (SamplingParams(top_p=0.8, top_k=20), SamplingParams(temperature=0.7, min_p=0.1, top_k=50))
    monkeypatch.setattr(sampling_mask, "SETTINGS", settings)
    with ThreadPoolExecutor(1) as thread:  # an event loop of its own, beside the test framework's
        rows, wrong = thread.submit(sampling_mask.measure, model, 1, 8, 32).result()
    assert wrong == []
    nucleus = {row.variant: row.mean_abs for row in rows if row.top_p == 0.8}
    assert nucleus["mask"] <= 1e-5
    assert 0.05 <= nucleus["none"] < nucleus["shifted"]


def test_the_benchmark_says_what_is_wrong() -> None:
    sampling = SamplingParams(top_p=0.8, top_k=20)
    assert sampling_mask.violations(sampling, {"mask": 1e-6, "none": 0.1, "shifted": 0.5}) == []
    assert "above 1e-05" in sampling_mask.violations(sampling, {"mask": 1e-3, "none": 1, "shifted": 1})[0]
    (found,) = sampling_mask.violations(sampling, {"mask": 1e-6, "none": 1e-6, "shifted": 0.5})
    assert "none has mean|Δ|" in found
