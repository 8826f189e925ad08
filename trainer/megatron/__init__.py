"""Everything that calls Megatron-Core or mbridge: model, schedule, routing replay, weights and parts of
tensors.

No other package imports Megatron-Core or mbridge. Losses, metrics and the steps of an update do not belong
here.

Importing any module of this package first prepares Megatron-Core for this machine (`cpu.install`), because
Megatron-Core makes some decisions only once, at import: whether to compile, and which kernels exist.
"""

from trainer.megatron import cpu

cpu.install()
