"""TransformerEngine 2.11 as far as Megatron-Core's layer spec needs it, in plain torch on a CPU.

Tests put the folder above first in `sys.path` of a process of their own (`tests.support.emulated_layers`), so
that Megatron-Core imports it in place of the real one, and its own subclasses (`TELinear`,
`TEColumnParallelGroupedLinear`, `TENorm`, ...) are built and give names and shapes of parameters.

Arguments, parameters, their attributes and `_extra_state` are those of 2.11.0. Numbers are those of
Megatron's own layers, bit for bit, as far as both compute the same: products go through Megatron's function.

Source: TransformerEngine v2.11, transformer_engine/pytorch/module/{linear,layernorm_linear,grouped_linear,
rmsnorm,base}.py, attention/dot_product_attention/dot_product_attention.py.
"""

import types

from transformer_engine import pytorch

__version__ = "2.11.0"
__all__ = ["common", "pytorch"]


class _DelayedScaling:
    """Is subclassed, never used: nothing here is quantised."""


common = types.SimpleNamespace(recipe=types.SimpleNamespace(DelayedScaling=_DelayedScaling))
