"""The Megatron model of one rank: process groups, layers, optimizer, and a schedule over micro-batches."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
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
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.router_replay import RouterReplay

from async_rl.config import LayoutConfig, OptimizerConfig
from async_rl.errors import ConfigError, EnvironmentNotReady
from async_rl.types import BoolArray, ExpertIdArray, Int32Array, Int64Array
from trainer.megatron.attention import PackedTrajectories, zigzag
from trainer.megatron.bridge import HFBridge
from trainer.megatron.cpu import has_transformer_engine
from trainer.megatron.packing import Packing
from trainer.megatron.replay import RouterReplayAdapter, to_targets

Result = TypeVar("Result")


class Inputs(NamedTuple):
    """One micro-batch on this rank's device."""

    token_ids: torch.Tensor  # [1, t] int64, this context rank's part
    packed: PackedTrajectories
    routing: torch.Tensor | None  # [t / tp, L_moe, K] int64, this rank's part; None routes natively


LossFunction = Callable[[int, torch.Tensor], tuple[torch.Tensor, int, Result]]
"""(index of the micro-batch, logits `[t, V / tp]`) → (summed loss, trained tokens, anything)."""


def choose_device(device: str, rank: int = 0) -> torch.device:
    """Resolve `trainer.device` and make it this process's; ranks that see several GPUs take turns.

    Raises:
        EnvironmentNotReady: When CUDA is asked for and absent.
        ConfigError: When the CPU is asked for beside a GPU.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise EnvironmentNotReady(
            "trainer.device is cuda, but torch sees no GPU: set trainer.device=auto or cpu"
        )
    if device == "cpu" and torch.cuda.is_available():
        raise ConfigError(
            "trainer.device is cpu, but this machine has a GPU, and Megatron-Core takes it: hide it with "
            "CUDA_VISIBLE_DEVICES= or set trainer.device=auto"
        )
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(rank % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def start_process_groups(
    rank: int, world_size: int, init_address: str, layout: LayoutConfig, timeout_s: float, seed: int = 0
) -> None:
    """Join the other ranks and lay out Megatron's parallel groups.

    Args:
        rank: This process.
        world_size: All of them.
        init_address: `host:port` where rank 0 listens, or a URL that torch.distributed knows; not used by a
            rank that is alone.
        layout: Parallel sizes.
        timeout_s: Longest wait in an exchange, seconds.
        seed: Of the generators that initialisation and dropout would use.

    Raises:
        EnvironmentNotReady: When the ranks do not find each other.
    """
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    where: dict[str, Any] = (
        {"store": dist.HashStore()}
        if world_size == 1
        else {"init_method": init_address if "://" in init_address else f"tcp://{init_address}"}
    )
    try:
        dist.init_process_group(
            backend, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s), **where
        )
    except (RuntimeError, ValueError) as e:
        raise EnvironmentNotReady(
            f"trainer rank {rank} of {world_size} could not join the others at {init_address!r}: {e}"
        ) from e
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        # Only for a distributed optimizer that gathers its state on CPU, which ours does not.
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def stop_process_groups() -> None:
    """Forget everything that Megatron holds per process, and leave the process group."""
    RouterReplay.clear_global_router_replay_instances()
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


class MegatronModel:
    """This rank's chunks of the model, with their optimizer.

    Invariant: outside `run` the gradients are those of the last `run` and nothing waits to be replayed.
    """

    def __init__(
        self,
        path: str,
        dtype: torch.dtype,
        device: torch.device,
        optimizer: OptimizerConfig,
        *,
        recompute: str = "none",
        replay: bool = False,
    ) -> None:
        """Build the model and load the folder's weights. The process groups must stand.

        Raises:
            ConfigError: When model, layout and replay do not go together.
        """
        self.device = device
        self.bridge = HFBridge(path, dtype, **_transformer_config(recompute, replay))
        self.config = self.bridge.config
        self._check_layout()
        modules = self.bridge.build()
        for module in modules:
            for parameter in module.parameters():
                tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
            module.to(device)
        if dtype != torch.float32:
            modules = [Float16Module(self.config, module) for module in modules]
        self.bridge.load_hf(modules)
        self.replay = RouterReplayAdapter(modules, self.config) if replay else None

        sharded = parallel_state.get_data_parallel_world_size(with_context_parallel=True) > 1
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=sharded)
        self.chunks = [DistributedDataParallel(self.config, ddp, module) for module in modules]
        self.config.finalize_model_grads_func = finalize_model_grads
        self.clip_grad = optimizer.clip_grad
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a rank without experts of its own has a stub optimizer
            self.optimizer: MegatronOptimizer = get_megatron_optimizer(
                MegatronOptimizerConfig(
                    optimizer="adam",
                    lr=optimizer.lr,
                    weight_decay=optimizer.weight_decay,
                    adam_beta1=optimizer.beta1,
                    adam_beta2=optimizer.beta2,
                    adam_eps=optimizer.eps,
                    clip_grad=optimizer.clip_grad,
                    bf16=dtype == torch.bfloat16,
                    params_dtype=dtype,
                    use_distributed_optimizer=sharded,
                ),
                self.chunks,
                use_gloo_process_groups=False,
            )
        if device.type == "cpu":
            for inner in self.inner_optimizers:
                for group in inner.param_groups:
                    group["fused"], group["foreach"] = (
                        True,
                        False,
                    )  # one kernel a parameter instead of a dozen

    def _check_layout(self) -> None:
        tp, heads, groups = (
            self.config.tensor_model_parallel_size,
            self.config.num_attention_heads,
            self.config.num_query_groups,
        )
        if heads % tp or groups % tp:
            raise ConfigError(
                f"trainer.layout.tp is {tp}, but the model has {heads} attention heads in {groups} groups: "
                "tp must divide both"
            )
        vocab = self.bridge.hf_config.vocab_size
        if vocab % tp:
            raise ConfigError(
                f"trainer.layout.tp is {tp}, but the vocabulary has {vocab} tokens: tp must divide it"
            )
        ep, experts = self.config.expert_model_parallel_size, self.config.num_moe_experts or 0
        if ep > 1 and experts % ep:
            raise ConfigError(
                f"trainer.layout.ep is {ep}, but the model has {experts} experts: ep must divide them"
            )
        etp = self.config.expert_tensor_parallel_size
        if experts and ep == 1 and etp != tp:
            # Megatron then takes experts for dense parameters and does not add up tensor ranks' gradients.
            raise ConfigError(
                f"trainer.layout has ep=1, tp={tp} and etp={etp}: without expert parallelism set etp={tp}"
            )
        pp = self.config.pipeline_model_parallel_size
        if self.config.num_layers % pp:
            raise ConfigError(
                f"trainer.layout.pp is {pp}, but the model has {self.config.num_layers} layers: pp must "
                "divide them"
            )

    @property
    def inner_optimizers(self) -> list[torch.optim.Optimizer]:
        """The torch optimizers, dense parameters before experts; they hold this rank's main parameters."""
        chained = (
            self.optimizer.chained_optimizers
            if isinstance(self.optimizer, ChainedOptimizer)
            else [self.optimizer]
        )
        return [part.optimizer for part in chained if part.optimizer is not None]

    @property
    def data_parallel_size(self) -> int:
        """Ranks among which a batch's trajectories are shared out."""
        return int(parallel_state.get_data_parallel_world_size())

    @property
    def data_parallel_rank(self) -> int:
        """This rank's place among them."""
        return int(parallel_state.get_data_parallel_rank())

    @property
    def tensor_group(self) -> dist.ProcessGroup:
        """The ranks that share the vocabulary."""
        return parallel_state.get_tensor_model_parallel_group()

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Add up what `run` gave on all ranks: tensor ranks hold the same, stages before the last nothing."""
        dist.all_reduce(values)
        return values / self.config.tensor_model_parallel_size

    @property
    def alignment(self) -> int:
        """Every packed trajectory must be a multiple of this: sequence and context ranks take equal parts."""
        tp, cp = self.config.tensor_model_parallel_size, self.config.context_parallel_size
        return tp * (2 * cp if cp > 1 else 1)

    def place(
        self,
        packing: Packing,
        token_ids: Int32Array,
        rows: ExpertIdArray | None = None,
        valid: BoolArray | None = None,
    ) -> tuple[Inputs, Int64Array]:
        """Bring this rank's part of a packed micro-batch to its device.

        Args:
            packing: Where the tokens come from.
            token_ids: `[S]`, the batch's.
            rows: `[S, L_moe, K]` routing to replay, or None.
            valid: `[S]`.

        Returns:
            The inputs, and for each row of the logits that come back its index in the batch, -1 where padded.
        """
        tp, cp = self.config.tensor_model_parallel_size, self.config.context_parallel_size
        source = packing.source
        if cp > 1:
            rank = parallel_state.get_context_parallel_rank()
            source = source[zigzag(packing.lengths, cp, rank, torch.device("cpu")).numpy()]
        real = source >= 0
        ids = np.where(real, token_ids[np.maximum(source, 0)], 0).astype(np.int64)
        routing = None
        if rows is not None and valid is not None and self.replay is not None:
            part = len(source) // tp
            first = part * parallel_state.get_tensor_model_parallel_rank()
            mine = source[first : first + part]  # sequence parallelism: routers see a slice
            known = (mine >= 0) & valid[np.maximum(mine, 0)]
            routing = to_targets(rows[np.maximum(mine, 0)], known, self.device)
        packed = PackedTrajectories.of(packing.lengths, self.device)
        return Inputs(torch.from_numpy(ids)[None].to(self.device), packed, routing), source

    def run(
        self, micro_batches: Sequence[Inputs], loss: LossFunction[Result], *, forward_only: bool = False
    ) -> list[Result]:
        """Run one schedule over micro-batches; gradients are summed and divided by all trained tokens.

        Args:
            micro_batches: This rank's; every data-parallel rank must bring the same number.
            loss: Called on the last pipeline stage only.
            forward_only: Without gradients.

        Returns:
            What `loss` returned last, one a micro-batch; empty on other stages than the last.
        """
        order = iter(enumerate(micro_batches))

        def forward(_: Any, chunk: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
            index, inputs = next(order)
            with self._replaying(inputs.routing):
                output = chunk(
                    input_ids=inputs.token_ids,
                    position_ids=None,
                    attention_mask=None,
                    packed_seq_params=inputs.packed,
                )
            return output, partial(reduce, index)

        def reduce(index: int, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Result]:
            summed, tokens, result = loss(index, logits.squeeze(0))
            return summed, torch.tensor(tokens, dtype=torch.int, device=self.device), result

        if not forward_only:
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
        for chunk in self.chunks:
            chunk.train(not forward_only)
        scheduled = self.replay.schedule() if self.replay else contextlib.nullcontext()
        with scheduled, torch.set_grad_enabled(not forward_only):
            return get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=None,
                model=self.chunks,
                num_microbatches=len(micro_batches),
                seq_length=max(inputs.token_ids.shape[1] for inputs in micro_batches),
                micro_batch_size=1,
                forward_only=forward_only,
            )

    @contextlib.contextmanager
    def _replaying(self, routing: torch.Tensor | None) -> Iterator[None]:
        if self.replay is None or routing is None:
            yield
            return
        with self.replay.micro_batch(routing):
            yield

    def step(self, learning_rate: float) -> float:
        """Clip the gradients and take one optimizer step, if they are finite.

        Returns:
            The norm of the gradients before clipping; when it is not finite, nothing was changed.
        """
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        if not math.isfinite(norm):
            return norm
        for inner in self.inner_optimizers:
            parameters = [p for group in inner.param_groups for p in group["params"]]
            clip_grad_by_total_norm_fp32(parameters, self.clip_grad, norm)
            for group in inner.param_groups:
                group["lr"] = learning_rate * group["lr_mult"]
        self.optimizer.step_with_ready_grads()
        return norm


def _transformer_config(recompute: str, replay: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "calculate_per_token_loss": True,  # gradients are divided by the tokens of the whole batch, see `run`
        "moe_enable_routing_replay": replay,
        "moe_token_dispatcher_type": "alltoall",
        "gradient_accumulation_fusion": False,  # a kernel of Apex
    }
    if recompute == "full":
        fields |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    elif recompute == "selective":
        # Fused attention keeps little; what fills the memory of an MoE model is what its experts keep.
        fields |= {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    if has_transformer_engine():
        fields |= {"moe_grouped_gemm": True, "moe_permute_fusion": True, "apply_rope_fusion": True}
    return fields
