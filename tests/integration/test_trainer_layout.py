"""The fields of Megatron's config that follow from the layout."""

import pytest

from async_rl.config import LayoutConfig

pytestmark = pytest.mark.megatron


@pytest.mark.parametrize(
    ("stages", "chunks", "varying"), [(1, None, True), (2, None, True), (2, 2, False), (4, 2, True)]
)
def test_only_two_interleaved_stages_have_micro_batches_of_one_length(monkeypatch, stages, chunks, varying):
    """They exchange shapes with one peer in two directions, over Gloo in an order that differs by machine."""
    from megatron.core import parallel_state

    from trainer.megatron.layout import transformer_config

    for name, size in (
        ("get_virtual_pipeline_model_parallel_world_size", chunks),
        ("get_pipeline_model_parallel_world_size", stages),
        ("get_tensor_model_parallel_world_size", 1),
    ):
        monkeypatch.setattr(parallel_state, name, lambda size=size: size)
    fields = transformer_config(LayoutConfig(), "none", replay=True, fused=False)
    assert fields["variable_seq_lengths"] is varying
