"""The Megatron model of one rank: layers, optimizer, and schedules over micro-batches.

Padding, and tokens that were not routed as the engine routed them, must not count as load of an expert:
neither in the counters for a router's expert bias nor in an auxiliary or z-loss. They still pass through the
layers, which costs little and does not affect other tokens. Megatron-Core takes a `padding_mask` for this
purpose. Version 0.16.1 has two errors in it, which this module corrects:

- The counters mask a `[tokens, experts]` map with `[tokens]` flags (`TopKRouter._apply_expert_bias`): an
error, or the
  wrong experts where both sizes agree (`count_real_tokens`).
- Only the first pipeline stage cuts the mask to its part of the sequence; the others use it as given
  (`padding_mask_for`).
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import ColumnParallelLinear, gather_from_sequence_parallel_region
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_attr_wrapped_model, unwrap_model

from async_rl.config import Config, TrainerConfig
from async_rl.engines.model_facts import read_config
from async_rl.types import BoolArray, ExpertIdArray, Int32Array, Int64Array
from trainer.losses.log_probs import KeptTokens, vocab_parallel_log_probs
from trainer.megatron.activation_offload import LayerInputsOnHost
from trainer.megatron.attention import PackedTrajectories, zigzag
from trainer.megatron.bridge import HFBridge
from trainer.megatron.cpu import fuses_layers
from trainer.megatron.host_optimizer import built_once
from trainer.megatron.layout import accumulate_in_place, fields_of, transformer_config
from trainer.megatron.lora import adapters, attach_adapters, sum_expert_gradients
from trainer.megatron.packing import Packing, sequence_cost
from trainer.megatron.replay import ReplayRows, RouterReplayAdapter, local_rows
from trainer.megatron.sliced_adam import step_in_slices
from trainer.memory.dimensions import dimensions_of
from trainer.passthrough import row_multiple
from trainer.validate import check_layout

Result = TypeVar("Result")


class MicroBatchInputs(NamedTuple):
    """One micro-batch on this rank; everything but its routing is on the device."""

    token_ids: torch.Tensor  # [1, t] int64, this context rank's part
    packed: PackedTrajectories
    excluded: torch.Tensor  # [1, t] bool, True where a token must not count as load of an expert
    routing: tuple[ReplayRows, ...] | None = None  # rows to replay, one entry per chunk; None routes natively


LossFunction = Callable[[int, torch.Tensor], tuple[torch.Tensor, int, Result]]
"""(index of the micro-batch, hidden states `[t, H]`) → (summed loss, number of trained tokens, any result).

The hidden states are the inputs of the output layer, which `MegatronModel.log_probs` applies. A value model
gives values instead, `[t, 1]` float32."""


class MegatronModel:
    """This rank's chunks of the model, with their optimizer.

    Invariant: outside `run_schedule`, gradients are those of its last call, and no replay target is pending.
    """

    def __init__(self, config: Config, device: torch.device, *, is_critic: bool = False) -> None:
        """Build the model and load the weights of `model.path`. Process groups of its layout must exist.

        A critic has a `ValueHead` as its output layer: no log-probs can be computed. It has no adapters, and
        replays no routing.

        Raises:
            ConfigError: When model, layout and replay are incompatible.
        """
        self.device = device
        self._reference: list[torch.Tensor] | None = None
        trainer, dtype = config.trainer, getattr(torch, config.model.dtype)
        replays = config.routing.replay != "off" and not is_critic
        self.lora = None if is_critic else trainer.lora
        passed, fused = trainer.megatron, fuses_layers(dtype)
        fields = transformer_config(trainer.layout, trainer.recompute, replays, fused=fused)
        sent = config.weights
        self.bridge = HFBridge(
            config.model.path,
            dtype,
            num_senders=sent.senders if sent.transport == "distributed" and not sent.overlap else 1,
            **fields | fields_of(TransformerConfig, passed),
        )
        self.config = self.bridge.config
        dimensions = dimensions_of(read_config(config.model.path))
        check_layout(trainer.layout, dimensions)
        self._inputs_on_host = (
            LayerInputsOnHost(self.config.hidden_size, device) if trainer.recompute == "offload" else None
        )
        self._row_multiple = row_multiple(passed, trainer.layout.tp)
        self.cost = sequence_cost(dimensions)
        modules = self.bridge.build_chunks()
        for module in modules:
            for parameter in module.parameters():
                tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
            module.to(device)
        if dtype != torch.float32:
            modules = [Float16Module(self.config, module) for module in modules]
        self.bridge.load_hf(modules)
        for module in modules:
            if self.lora is not None:
                attach_adapters(module, self.lora, config.run.seed)
            count_real_tokens(module)
            forget_probabilities(module)
            if fused and passed.get("gradient_accumulation_fusion", True):
                accumulate_in_place(module)
            if is_critic:
                replace_output_layer(unwrap_model(module))
            elif get_attr_wrapped_model(module, "post_process"):
                leave_out_output_layer(get_attr_wrapped_model(module, "output_layer"))
        self.replay = RouterReplayAdapter(modules, self.config, device) if replays else None
        self.chunks = self._reduce_gradients(modules, trainer)
        self._number = {chunk: number for number, chunk in enumerate(self.chunks)}
        self.clip_grad = trainer.optimizer.clip_grad
        self.optimizer = self._make_optimizer(
            trainer, trainer.critic.lr if is_critic else trainer.optimizer.lr
        )

    def _reduce_gradients(
        self, modules: list[torch.nn.Module], trainer: TrainerConfig
    ) -> list[DistributedDataParallel]:
        """Wrap modules so that their gradients are summed over data-parallel ranks."""
        sharded = parallel_state.get_data_parallel_world_size(with_context_parallel=True) > 1
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            # Only Megatron's distributed optimizer can leave main weights to another one.
            use_distributed_optimizer=sharded or bool(trainer.megatron.get("use_precision_aware_optimizer")),
            overlap_grad_reduce=trainer.overlap_grad_reduce and sharded,
            # It would delay updated parameters until the next forward pass, after weights are published.
            overlap_param_gather=False,
            **fields_of(DistributedDataParallelConfig, trainer.megatron),
        )
        chunks = [DistributedDataParallel(self.config, ddp, module) for module in modules]
        self.config.finalize_model_grads_func = (
            finalize_model_grads if self.lora is None else _finalize_adapters
        )
        if ddp.overlap_grad_reduce:  # gradients are reduced over ranks with the last micro-batch
            waits = [chunk.no_sync for chunk in chunks]
            self.config.no_sync_func = waits if len(waits) > 1 else waits[0]
        return chunks

    def _make_optimizer(self, trainer: TrainerConfig, learning_rate: float) -> MegatronOptimizer:
        settings, dtype = trainer.optimizer, self.bridge.mbridge.dtype
        distributed = self.chunks[0].ddp_config.use_distributed_optimizer
        with warnings.catch_warnings(), built_once(distributed=distributed):
            warnings.simplefilter("ignore")  # a rank without experts has a stub optimizer
            optimizer: MegatronOptimizer = get_megatron_optimizer(
                MegatronOptimizerConfig(
                    optimizer="adam",
                    lr=learning_rate,
                    weight_decay=settings.weight_decay,
                    adam_beta2=settings.beta2,
                    clip_grad=settings.clip_grad,
                    bf16=dtype == torch.bfloat16,
                    params_dtype=dtype,
                    use_distributed_optimizer=distributed,
                    store_param_remainders=False,
                    **{"optimizer_offload_fraction": 1.0}
                    | fields_of(MegatronOptimizerConfig, trainer.megatron),
                ),
                self.chunks,
                use_gloo_process_groups=False,
            )
        for group in (group for inner in _torch_optimizers(optimizer) for group in inner.param_groups):
            # Megatron leaves norms and biases as they are, by a factor that only its scheduler applies.
            group["weight_decay"] = settings.weight_decay * group["wd_mult"]
            if self.device.type == "cpu":  # one kernel a parameter instead of a dozen
                group["fused"], group["foreach"] = True, False
        for inner in _torch_optimizers(optimizer):
            step_in_slices(inner)
        return optimizer

    def close(self) -> None:
        """Release the last autograd graph, and with it the model, which must not be used afterwards.

        A token dispatcher references the probabilities of its last micro-batch, their graph references the
        gradient accumulators, and these reference the model through a hook that Python's garbage collector
        cannot see.
        """
        for chunk in self.chunks:
            for module in chunk.modules():
                if isinstance(module, MoELayer):
                    module.token_dispatcher = None

    @property
    def inner_optimizers(self) -> list[torch.optim.Optimizer]:
        """The torch optimizers, for dense parameters first; they hold this rank's main parameters."""
        return _torch_optimizers(self.optimizer)

    @property
    def data_parallel_size(self) -> int:
        """The number of ranks over which a batch's trajectories are distributed."""
        return int(parallel_state.get_data_parallel_world_size())

    @property
    def data_parallel_rank(self) -> int:
        """This rank's index among the data-parallel ranks."""
        return int(parallel_state.get_data_parallel_rank())

    @property
    def leads_data_parallel_rank(self) -> bool:
        """Whether this is the first of the ranks that train the same trajectories."""
        return not (
            parallel_state.get_tensor_model_parallel_rank()
            or parallel_state.get_pipeline_model_parallel_rank()
            or parallel_state.get_context_parallel_rank()
        )

    @property
    def tensor_group(self) -> dist.ProcessGroup:
        """The ranks that share the vocabulary."""
        return parallel_state.get_tensor_model_parallel_group()

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Sum values over ranks: equal on tensor ranks, zero on pipeline stages before the last."""
        dist.all_reduce(values)
        return values / self.config.tensor_model_parallel_size

    def sum_over_data_parallel(self, values: torch.Tensor) -> torch.Tensor:
        """Sum values, in place, over the ranks that train other trajectories."""
        dist.all_reduce(values, group=parallel_state.get_data_parallel_group())
        return values

    def sum_over_context(self, values: torch.Tensor) -> torch.Tensor:
        """Sum values over the ranks that share the tokens of each trajectory."""
        if self.config.context_parallel_size > 1:
            dist.all_reduce(values, group=parallel_state.get_context_parallel_group())
        return values

    def keep_reference(self) -> None:
        """Copy the current weights to the host, as those of the reference policy; of adapters, nothing."""
        if self.lora is not None:
            return
        reference = [p.detach().to("cpu", copy=True) for p in self._parameters()]
        if self.device.type == "cuda":  # from pinned memory the copies back need not wait for each other
            reference = [p.pin_memory() for p in reference]
        self._reference = reference

    @contextlib.contextmanager
    def as_reference(self) -> Iterator[None]:
        """Give the model the reference policy's weights within the block, for forward passes only.

        Both sets of weights change places, one tensor after the other: the device never holds two sets. A
        model with adapters runs without them.
        """
        if self.lora is not None:
            with self._without_adapters():
                yield
            return
        self._swap_with_reference()
        try:
            yield
        finally:
            self._swap_with_reference()

    @contextlib.contextmanager
    def _without_adapters(self) -> Iterator[None]:
        found = list(adapters(self.chunks))
        for adapter in found:
            adapter.enabled = False
        try:
            yield
        finally:
            for adapter in found:
                adapter.enabled = True

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [p for chunk in self.chunks for p in chunk.parameters()]

    @torch.no_grad()
    def _swap_with_reference(self) -> None:
        assert self._reference is not None, "keep_reference comes first"
        # In place, because parameters are views of one buffer with the distributed optimizer. Copies are in
        # the order of one stream: the host's tensor is read before it is overwritten.
        for parameter, host in zip(self._parameters(), self._reference, strict=True):
            current = parameter.detach().clone()
            parameter.copy_(host, non_blocking=True)
            host.copy_(current, non_blocking=True)
            del current  # before the next one is copied

    @property
    def _interleaved(self) -> int:
        """The number of chunks of this rank's stage."""
        return self.config.virtual_pipeline_model_parallel_size or 1

    @property
    def micro_batch_multiple(self) -> int:
        """A schedule's number of micro-batches must be a multiple of this; above 1 for interleaved stages."""
        return int(self.config.pipeline_model_parallel_size) if self._interleaved > 1 else 1

    @property
    def level_lengths(self) -> bool:
        """Whether all micro-batches of a schedule must have the same length."""
        return not self.config.variable_seq_lengths

    @property
    def alignment(self) -> int:
        """The length of each packed trajectory must be a multiple of this, for equal parts on all ranks."""
        tp, cp = self.config.tensor_model_parallel_size, self.config.context_parallel_size
        return int(tp * (2 * cp if cp > 1 else 1) * self._row_multiple)

    def place_inputs(
        self,
        packing: Packing,
        token_ids: Int32Array,
        rows: ExpertIdArray | None = None,
        valid: BoolArray | None = None,
    ) -> tuple[MicroBatchInputs, Int64Array]:
        """Copy this rank's part of a packed micro-batch to its device.

        Args:
            packing: Maps packed positions to tokens of the batch.
            token_ids: `[S]`, the tokens of the batch.
            rows: `[S, L_moe, K]`, the routing rows to replay, or None.
            valid: `[S]`, True for tokens with a valid row. The others do not count as load of an expert.

        Returns:
            The inputs, and for each row of the hidden states its index in the batch, -1 where padded.
        """
        tp, cp = self.config.tensor_model_parallel_size, self.config.context_parallel_size
        source = packing.source
        if cp > 1:
            rank = parallel_state.get_context_parallel_rank()
            source = source[zigzag(packing.lengths, cp, rank, torch.device("cpu")).numpy()]
        counted = source >= 0
        ids = np.where(counted, token_ids[np.maximum(source, 0)], 0).astype(np.int64)
        routing = None
        if rows is not None and valid is not None and self.replay is not None:
            part = len(source) // tp
            first = part * parallel_state.get_tensor_model_parallel_rank()
            mine = source[first : first + part]  # under sequence parallelism routers see a slice
            routing = tuple(
                local_rows(rows, valid, mine, columns, self.device) for columns in self.replay.columns
            )
            counted &= valid[np.maximum(source, 0)]
        return MicroBatchInputs(
            token_ids=torch.from_numpy(ids)[None].to(self.device),
            packed=PackedTrajectories.of(packing.lengths, self.device),
            excluded=torch.from_numpy(~counted)[None].to(self.device),
            routing=routing,
        ), source

    def run_schedule(
        self,
        micro_batches: Sequence[MicroBatchInputs],
        loss: LossFunction[Result],
        *,
        forward_only: bool = False,
    ) -> list[Result]:
        """Run one schedule over micro-batches; gradients are summed and divided by the number of trained
        tokens.

        Args:
            micro_batches: This rank's micro-batches, the same number on every data-parallel rank. Routing
                rows in them are replayed.
            loss: Called on the last pipeline stage only.
            forward_only: Whether to skip the backward passes.

        Returns:
            The third result of `loss` for each micro-batch; empty on stages before the last.
        """

        def through(index: int, chunk: int, forward: Callable[[], torch.Tensor]) -> torch.Tensor:
            routing = micro_batches[index].routing
            if routing is None or self.replay is None:
                return forward()
            with self.replay.replay_micro_batch(chunk, routing[chunk]):
                return forward()

        return self._schedule(micro_batches, loss, through, forward_only=forward_only)

    def log_probs(
        self,
        hidden: torch.Tensor,
        labels: torch.Tensor,
        temperature: float,
        kept: KeptTokens | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probs of labels and entropies, `[n]` each, on the last pipeline stage.

        Args:
            hidden: `[n, H]`, rows of the hidden states that a `LossFunction` gets.
            labels: `[n]` int64.
            temperature: The sampling temperature.
            kept: The tokens that could be sampled in each row; None: all could.
        """
        model = unwrap_model(self.chunks[-1])
        shared = model.share_embeddings_and_output_weights
        weight = model.shared_embedding_or_output_weight() if shared else model.output_layer.weight
        return vocab_parallel_log_probs(
            hidden, weight, labels, temperature, self.tensor_group, kept, model.vocab_size
        )

    def record_routing(
        self, micro_batches: Sequence[MicroBatchInputs], loss: LossFunction[Result]
    ) -> tuple[list[Result], list[MicroBatchInputs]]:
        """Run one schedule without gradients and records which experts the routers choose.

        Args:
            micro_batches: As for `run_schedule`; routing in them is ignored.
            loss: As for `run_schedule`.

        Returns:
            The results of `run_schedule`, and the micro-batches with the recorded routing.
        """
        replay = self.replay
        assert replay is not None, "the model was built without a replay"
        rows: list[dict[int, ReplayRows]] = [{} for _ in micro_batches]

        def through(index: int, chunk: int, forward: Callable[[], torch.Tensor]) -> torch.Tensor:
            tokens = micro_batches[index].token_ids.shape[1] // self.config.tensor_model_parallel_size
            output, rows[index][chunk] = replay.record_micro_batch(chunk, tokens, forward)
            return output

        results = self._schedule(micro_batches, loss, through, forward_only=True)
        return results, [
            inputs._replace(routing=tuple(by_chunk[chunk] for chunk in range(len(self.chunks))))
            for inputs, by_chunk in zip(micro_batches, rows, strict=True)
        ]

    def _schedule(
        self,
        micro_batches: Sequence[MicroBatchInputs],
        loss: LossFunction[Result],
        through: Callable[[int, int, Callable[[], torch.Tensor]], torch.Tensor],
        *,
        forward_only: bool,
    ) -> list[Result]:
        """Run a schedule; `through` wraps the forward pass of one micro-batch through one chunk."""

        def forward(order: Iterator[int], chunk: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
            index = next(order)
            inputs = micro_batches[index]
            mask = padding_mask_for(
                inputs.excluded,
                first_stage=get_attr_wrapped_model(chunk, "pre_process"),
                tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
                tensor_size=self.config.tensor_model_parallel_size,
            )
            # Hidden states stay in the type of the model.
            kept = {"fp32_output": False} if isinstance(chunk.module, Float16Module) else {}
            call = partial(
                chunk,
                input_ids=inputs.token_ids,
                position_ids=None,
                attention_mask=None,
                packed_seq_params=inputs.packed,
                padding_mask=mask,
                **kept,
            )
            moved = contextlib.nullcontext()
            if self._inputs_on_host is not None and not forward_only:
                moved = self._inputs_on_host.forward_pass()
            with moved:
                return through(index, self._number[chunk], call), partial(reduce, index)

        def reduce(index: int, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Result]:
            summed, tokens, result = loss(index, hidden.squeeze(0))
            return summed, torch.tensor(tokens, dtype=torch.int, device=self.device), result

        if not forward_only:
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
        for chunk in self.chunks:
            chunk.train(not forward_only)
        # When interleaved, each chunk advances through the micro-batches at its own pace.
        orders = [iter(range(len(micro_batches))) for _ in self.chunks]
        context_ranks = self.config.context_parallel_size
        scheduled = self.replay.guard_schedule() if self.replay else contextlib.nullcontext()
        with scheduled, torch.set_grad_enabled(not forward_only):
            return get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=orders if len(orders) > 1 else orders[0],
                model=self.chunks,
                num_microbatches=len(micro_batches),
                seq_length=max(inputs.token_ids.shape[1] for inputs in micro_batches) * context_ranks,
                micro_batch_size=1,
                forward_only=forward_only,
            )

    def take_optimizer_step(self, learning_rate: float, *, skip_above: float | None = None) -> float:
        """Clip the gradients and take one optimizer step, if their norm is finite and not above
        `skip_above`.

        A step without any gradient, of groups of equal rewards, is none: Adam's momentum would repeat the
        steps before, at up to 0.9 of their size, with nothing to correct their direction.

        Returns:
            The norm of the gradients before clipping. If it is 0, not finite or above `skip_above`, no weight
            changed.
        """
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        if not math.isfinite(norm) or norm == 0.0 or (skip_above is not None and norm > skip_above):
            return norm
        config = self.optimizer.config
        decoupled = config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
        for inner in self.inner_optimizers:
            parameters = [p for group in inner.param_groups for p in group["params"]]
            clip_grad_by_total_norm_fp32(parameters, self.clip_grad, norm, decoupled)
            for group in inner.param_groups:
                group["lr"] = learning_rate * group["lr_mult"]
        self.optimizer.step_with_ready_grads()
        return norm


def _torch_optimizers(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    chained = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    return [part.optimizer for part in chained if part.optimizer is not None]


def _finalize_adapters(chunks: list[torch.nn.Module], *rest: Any, **named: Any) -> None:
    finalize_model_grads(chunks, *rest, **named)
    sum_expert_gradients(chunks)


class ValueHead(torch.nn.Module):
    """The output layer of a value model: one number for each token, 0 before the first update.

    Tensor-parallel ranks hold the same weight and apply it to their parts of the sequence.
    """

    def __init__(self, layer: ColumnParallelLinear, like: torch.Tensor) -> None:
        """Take the place of a language model's output layer; `like` is any weight of its model."""
        super().__init__()
        self.weight = torch.nn.Parameter(like.new_zeros(1, layer.input_size))
        self.sequence_parallel, self._group = layer.sequence_parallel, layer.tp_group
        # Megatron sums its gradient over the ranks that share the sequence, as a norm's.
        self.weight.sequence_parallel = layer.sequence_parallel
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(self.weight)

    def forward(self, hidden: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        """Return values, `[t, 1, 1]` float32, of hidden states, `[t, 1, H]` or this rank's part of them."""
        values = torch.nn.functional.linear(hidden.float(), self.weight.float())
        if self.sequence_parallel:  # every rank computes the whole loss: gradients are split, not summed
            values = gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self._group
            )
        return values, None


def replace_output_layer(chunk: torch.nn.Module) -> None:
    """Make a chunk that of a value model; its embedding is no longer tied to an output layer."""
    chunk.share_embeddings_and_output_weights = False
    if chunk.post_process:
        chunk.output_layer = ValueHead(chunk.output_layer, next(chunk.decoder.parameters()).data)


def leave_out_output_layer(layer: ColumnParallelLinear) -> None:
    """Make a model return the inputs of its output layer, gathered from the tensor-parallel ranks.

    The logits of all tokens would take more memory than anything else in a step.
    """
    gathered = layer.tp_group if layer.sequence_parallel else None
    layer.forward = partial(_hidden_states, gathered)


def _hidden_states(
    gathered: dist.ProcessGroup | None, hidden: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, None]:
    if gathered is not None:  # in the backward pass gradients are summed over the group
        hidden = gather_from_sequence_parallel_region(hidden, group=gathered)
    return hidden, None


def count_real_tokens(chunk: torch.nn.Module) -> None:
    """Make the routers of a chunk exclude masked tokens from their counters."""
    for module in chunk.modules():
        if isinstance(module, TopKRouter):
            module._apply_expert_bias = partial(_count, module._apply_expert_bias)


def _count(original: Any, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
    if padding_mask is not None:
        routing_map = routing_map.masked_fill(padding_mask[:, None], 0)
    original(routing_map)


def forget_probabilities(chunk: torch.nn.Module) -> None:
    """Make token dispatchers drop the gates of a micro-batch when its tokens are back.

    Their graph leads to the layer's input and its gradient. Where layers are computed again, both would stay
    on the device until the layer's next micro-batch.
    """
    for module in chunk.modules():
        if isinstance(module, MoELayer):
            dispatcher = module.token_dispatcher
            dispatcher.combine_postprocess = partial(_combine, dispatcher, dispatcher.combine_postprocess)


def _combine(dispatcher: Any, original: Callable[..., torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    output = original(tokens)
    for holder in (dispatcher, vars(dispatcher).get("_comm_manager")):  # of the flex dispatcher
        for name in ("probs", "local_probs", "token_probs", "dispatched_probs"):
            if hasattr(holder, name):
                setattr(holder, name, None)
    return output


def padding_mask_for(
    excluded: torch.Tensor, *, first_stage: bool, tensor_rank: int, tensor_size: int
) -> torch.Tensor:
    """Return the `padding_mask` of a chunk: the whole mask, `[1, t]`, or this rank's part of it.

    Args:
        excluded: `[1, t]` bool, True where a token does not count.
        first_stage: Whether the chunk holds the embedding.
        tensor_rank: This rank's index among the ranks that share the sequence.
        tensor_size: The number of ranks that share the sequence.
    """
    if first_stage:
        return excluded
    part = excluded.shape[1] // tensor_size
    return excluded[:, tensor_rank * part : (tensor_rank + 1) * part]
