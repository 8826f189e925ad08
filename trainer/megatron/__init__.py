"""Everything that touches Megatron-Core.

Importing any module of this package first makes Megatron-Core fit for this machine (`cpu.install`): some of
what it decides (whether to compile, which kernels exist) is decided once, while it is being imported.
"""

from trainer.megatron import cpu

cpu.install()
