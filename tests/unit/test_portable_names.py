"""Names of parameters that do not depend on the layer spec."""

from __future__ import annotations

import pytest

from trainer.megatron.names import portable_names

pytestmark = [pytest.mark.megatron, pytest.mark.filterwarnings("ignore:::megatron")]

EXPERTS = "mlp.router.weight"
LATENT = "self_attention.linear_kv_down_proj.weight"


@pytest.mark.parametrize(
    "before", ["", "critic.", "optimizer.state.exp_avg.", "critic.optimizer.state.fp32_param."]
)
@pytest.mark.parametrize(
    ("kinds", "name", "portable"),
    [
        ((), "input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
        ((), "pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
        ((), "self_attention.q_layernorm.weight", None),
        ((EXPERTS,), "input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
        ((EXPERTS,), "pre_mlp_layernorm.weight", None),
        ((EXPERTS,), "mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
        ((EXPERTS,), "mlp.experts.experts.3.linear_fc1.weight_w", None),
        ((LATENT,), "input_layernorm.weight", None),
        ((LATENT,), "self_attention.q_layernorm.weight", "self_attention.linear_q_up_proj.layer_norm_weight"),
        ((LATENT,), "pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
        ((LATENT, EXPERTS), "pre_mlp_layernorm.weight", None),
        ((LATENT, EXPERTS), "input_layernorm.weight", None),
    ],
)
def test_a_norm_has_the_name_of_transformer_engines_spec_when_either_spec_is_built(
    before: str, kinds: tuple[str, ...], name: str, portable: str | None
) -> None:
    key, *others = (f"{before}decoder.layers.12.{each}" for each in (name, *kinds))
    # The kinds of other layers, such as 1 and 2, have no effect on layer 12.
    elsewhere = {EXPERTS, LATENT} - set(kinds)
    others += [f"{before}decoder.layers.{layer}.{kind}" for layer in (1, 2, 112) for kind in elsewhere]
    found = portable_names([key, *others])
    assert list(portable_names(list(found.values())).values()) == list(found.values())
    assert found.pop(key) == (key if portable is None else f"{before}decoder.layers.12.{portable}")
    assert list(found) == list(found.values()) == others
