"""The layers."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

ops = types.SimpleNamespace(Sequential=torch.nn.Sequential, FusibleOperation=torch.nn.Module)
distributed = types.SimpleNamespace(CudaRNGStatesTracker=type("CudaRNGStatesTracker", (), {}))


class _Module(torch.nn.Module):
    """What all layers have: an extra state. It is not empty, as if there was something to keep."""

    def __init__(self) -> None:
        super().__init__()
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False}
        self.fp8 = self.fp8_calibration = False

    def get_extra_state(self) -> torch.Tensor:
        return torch.arange(8, dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor | None) -> None:
        raise AssertionError("nothing keeps it")

    def init_fp8_metadata(self, num_gemms: int = 1) -> None: ...

    def _add(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: Any) -> torch.nn.Parameter:
        # Weights are not drawn: a product with one that was not loaded shows it.
        parameter = torch.nn.Parameter(torch.full(shape, torch.nan, dtype=dtype, device=device))
        self.register_parameter(name, parameter)
        return parameter


def _mark(parameter: torch.nn.Parameter, dim: int) -> None:
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dim, 1


class RMSNorm(_Module):
    def __init__(
        self,
        normalized_shape: int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        device: Any = "cuda",
    ) -> None:
        super().__init__()
        assert not zero_centered_gamma
        size = hidden_size or normalized_shape
        assert size is not None
        self.eps = eps
        self._add("weight", (size,), params_dtype or torch.float32, device)
        self.weight.sequence_parallel = sequence_parallel

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(input_, self.weight.shape, self.weight, self.eps)


class LayerNorm(RMSNorm):
    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("no supported model uses it")


class _Parallel(_Module):
    """A product over tensor-parallel ranks: `parallel_mode` is column, row, or None for a whole one."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        bias: bool = True,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = "cuda",
        **_: Any,  # how weights are drawn
    ) -> None:
        assert not fuse_wgrad_accumulation
        super().__init__()
        self.tp_size = tp_size if tp_group is None else tp_group.size()
        self.tp_group, self.parallel_mode, self.use_bias = tp_group, parallel_mode, bias
        self.in_features, self.out_features = in_features, out_features
        if parallel_mode == "column":
            self.out_features //= self.tp_size
        elif parallel_mode == "row":
            self.in_features //= self.tp_size
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel
        self._dtype, self._device = params_dtype or torch.float32, device

    def _add_weight(self, number: str = "") -> None:
        weight = self._add(
            f"weight{number}", (self.out_features, self.in_features), self._dtype, self._device
        )
        _mark(weight, 1 if self.parallel_mode == "row" else 0)
        if not self.use_bias:
            setattr(self, f"bias{number}", torch.Tensor().to(self._dtype))
            return
        added = self._add(f"bias{number}", (self.out_features,), self._dtype, self._device)
        if self.parallel_mode == "row":
            added.sequence_parallel = self.sequence_parallel
        elif self.parallel_mode == "column":
            _mark(added, 0)

    def _multiply(
        self, input_: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        # Imported here because Megatron-Core imports this module.
        from megatron.core.tensor_parallel import mappings
        from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce

        column = self.parallel_mode == "column"
        output = linear_with_grad_accumulation_and_async_allreduce(
            input_,
            weight,
            bias if self.parallel_mode != "row" else None,
            gradient_accumulation_fusion=False,
            allreduce_dgrad=column and self.tp_size > 1 and not self.sequence_parallel,
            sequence_parallel=column and self.sequence_parallel,
            tp_group=self.tp_group,
        )
        if self.parallel_mode == "row" and self.tp_size > 1:
            if self.sequence_parallel:
                output = mappings.reduce_scatter_to_sequence_parallel_region(output, group=self.tp_group)
            else:
                output = mappings.reduce_from_tensor_model_parallel_region(output, group=self.tp_group)
        return output + bias if bias is not None and self.parallel_mode == "row" else output


class Linear(_Parallel):
    def __init__(
        self, in_features: int, out_features: int, *, return_bias: bool = False, **options: Any
    ) -> None:
        super().__init__(in_features, out_features, **options)
        self.return_bias = return_bias
        self._add_weight()

    def forward(self, input_: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        bias = self.bias if self.use_bias else None
        output = self._multiply(input_, self.weight, None if self.return_bias else bias)
        return (output, bias) if self.return_bias else output


class LayerNormLinear(Linear):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        return_layernorm_output: bool = False,
        zero_centered_gamma: bool = False,
        **linear: Any,
    ) -> None:
        super().__init__(in_features, out_features, **linear)
        assert normalization == "RMSNorm"
        self.return_layernorm_output = return_layernorm_output
        assert not zero_centered_gamma
        self.eps = eps
        self._add("layer_norm_weight", (in_features,), self._dtype, self._device)
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel

    def forward(self, input_: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        weight = self.layer_norm_weight
        normalised = F.rms_norm(input_, weight.shape, weight, self.eps)
        output = super().forward(normalised)
        if not self.return_layernorm_output:
            return output
        return (*output, normalised) if self.return_bias else (output, normalised)


class GroupedLinear(_Parallel):
    def __init__(self, num_gemms: int, in_features: int, out_features: int, **options: Any) -> None:
        super().__init__(in_features, out_features, **options)
        assert not self.use_bias
        self.num_gemms = num_gemms
        for number in range(num_gemms):
            self._add_weight(str(number))

    def forward(
        self, input_: torch.Tensor, m_splits: list[int], is_first_microbatch: bool | None = None
    ) -> torch.Tensor:
        from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce

        parts = [  # dispatchers exchange tokens: there is nothing to communicate here
            linear_with_grad_accumulation_and_async_allreduce(
                part,
                getattr(self, f"weight{number}"),
                None,
                False,
                allreduce_dgrad=False,
                sequence_parallel=False,
            )
            for number, part in enumerate(input_.split(m_splits))
        ]
        return torch.cat(parts)


class DotProductAttention(_Module):
    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        softmax_scale: float | None = None,
        cp_group: dist.ProcessGroup | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale
        self.context = cp_group or types.SimpleNamespace(size=lambda: 1)

    def forward(
        self,
        query_layer: torch.Tensor,
        key_layer: torch.Tensor,
        value_layer: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        attn_mask_type: str | None = None,
        **_: Any,
    ) -> torch.Tensor:
        from trainer.megatron.attention import PackedAttention, PackedTrajectories

        assert (qkv_format, attn_mask_type) == ("thd", "padding_causal")
        assert cu_seqlens_q is not None
        lengths = tuple(cu_seqlens_q.diff().tolist())
        attention = PackedAttention(
            None,
            0,
            None,
            "self",
            softmax_scale=self.softmax_scale,
            pg_collection=types.SimpleNamespace(cp=self.context),
        )
        packed = PackedTrajectories.of(lengths, query_layer.device)
        return attention(query_layer, key_layer, value_layer, attention_mask, packed_seq_params=packed)
