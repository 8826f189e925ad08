"""The names of parameters, which are the same whatever layer spec a model is built from.

Megatron-Core's two layer specs differ in where norms belong. The names here are those of the spec with
TransformerEngine, which mbridge expects, too:

```
layer                Megatron's own layers                TransformerEngine's layers
any                  input_layernorm.                     self_attention.linear_qkv.layer_norm_
with latent          input_layernorm.                     input_layernorm.
attention            self_attention.{q,kv}_layernorm.     self_attention.linear_{q,kv}_up_proj.layer_norm_
dense                pre_mlp_layernorm.                   mlp.linear_fc1.layer_norm_
with experts         pre_mlp_layernorm., or in its        pre_mlp_layernorm.
                     checkpoints mlp.linear_fc1.layer_norm_
```

The last is an error of megatron-core 0.16.1: `get_gpt_layer_local_spec` gives layers with experts the map of
dense layers (`sharded_state_dict_keys_map`), and layers with latent attention none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_IN_LAYER = re.compile(r"^(?P<layer>.*\bdecoder\.layers\.(?P<number>\d+)\.)(?P<name>.+)$")

_OF_ATTENTION = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
_OF_LATENT_ATTENTION = {
    f"self_attention.{part}_layernorm.": f"self_attention.linear_{part}_up_proj.layer_norm_"
    for part in ("q", "kv")
}
_OF_DENSE = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
_OF_EXPERTS = {new: old for old, new in _OF_DENSE.items()}


def portable_names(names: Iterable[str]) -> dict[str, str]:
    """Return the portable name of each parameter, or of each tensor of a checkpoint.

    ```
    optimizer.state.exp_avg.decoder.layers.1.mlp.linear_fc1.layer_norm_weight   (layer 1 has experts)
    optimizer.state.exp_avg.decoder.layers.1.pre_mlp_layernorm.weight
    ```

    Args:
        names: All names of a model's layers, of either spec. Those of a layer tell which kind it is; what
            stands before `decoder.` is kept.
    """
    found = {name: _IN_LAYER.match(name) for name in names}
    layers: dict[str, set[str]] = {
        "mlp.router.weight": set(),
        "self_attention.linear_kv_down_proj.weight": set(),
    }
    for match in found.values():
        if match and match["name"] in layers:
            layers[match["name"]].add(match["number"])
    with_experts, latent = layers.values()

    def renamed(match: re.Match[str]) -> str:
        number, name = match["number"], match["name"]
        changes = (_OF_LATENT_ATTENTION if number in latent else _OF_ATTENTION) | (
            _OF_EXPERTS if number in with_experts else _OF_DENSE
        )
        for old, new in changes.items():
            if name.startswith(old):
                return match["layer"] + new + name.removeprefix(old)
        return match.string

    return {name: renamed(match) if match else name for name, match in found.items()}
