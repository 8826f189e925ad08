"""Inputs of layers that are on the host until their backward pass: the same step, with less on the device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.logits_memory import PeakBytes
from tests.support.tiny_model import build_tiny_qwen3_moe
from tests.support.train_batches import random_batch
from tests.support.trainers import differing, gradients, started, trainer_config
from trainer.megatron import activation_offload

pytestmark = [pytest.mark.real, pytest.mark.megatron]

LAYERS, HIDDEN = 4, 32


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_qwen3_moe(tmp_path_factory.mktemp("models") / "moe", num_layers=LAYERS)


class Elsewhere:
    """A copy of which torch knows nothing, as it knows nothing of the host's while it counts a device's."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._bits = np.array(tensor.detach().view(torch.uint8).numpy())
        self._dtype = tensor.dtype
        self.nbytes = self._bits.nbytes

    def to(self, device: torch.device, non_blocking: bool) -> torch.Tensor:
        assert non_blocking
        return torch.from_numpy(self._bits).clone().view(self._dtype).to(device)


@pytest.mark.parametrize("replay", ["r3", "r2"])
def test_a_step_is_the_same_when_inputs_of_layers_are_on_the_host(
    moe: Path, replay: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Elsewhere] = []

    def copy(tensor: torch.Tensor) -> Elsewhere:
        kept.append(Elsewhere(tensor))
        return kept[-1]

    found, peaks = [], []
    for offload in (False, True):
        config = trainer_config(
            moe, replay=replay, recompute="offload" if offload else "full", micro_batch_tokens=1024
        )
        with started(config) as worker:
            batch = random_batch(1, layers=LAYERS, lengths=(300, 280), group_size=2)
            worker.train_on(batch, 1)  # the optimizer's state
            if offload:
                monkeypatch.setattr(activation_offload, "copy_to_host", copy)
            with PeakBytes() as live:
                worker.train_on(batch, 2)
            found.append(gradients(worker))
            peaks.append(live.peak)
    assert not differing(*found)
    hidden = 580 * HIDDEN * 4
    assert len(kept) >= LAYERS
    assert {each.nbytes for each in kept} == {hidden}
    # The peak is in the backward pass of the last layer: the inputs of the others are not there then.
    assert peaks[0] - peaks[1] >= (LAYERS - 2) * hidden
