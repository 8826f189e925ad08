"""A rank's device and process groups: choosing the device, joining the other ranks and leaving them."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.moe.router_replay import RouterReplay

from async_rl.config import LayoutConfig
from async_rl.errors import EnvironmentNotReady
from async_rl.runtime.devices import bind_to_numa_node
from async_rl.weights.broadcast import open_store
from trainer.validate import check_device


def choose_device(device: str, rank: int = 0, *, bind_numa: bool = False) -> torch.device:
    """Resolves `trainer.device` and makes it this process's device; ranks are assigned to GPUs round-robin.

    Args:
        device: `trainer.device`.
        rank: The rank of this process.
        bind_numa: Whether this process is restricted to the cores beside its GPU.

    Raises:
        EnvironmentNotReady: When CUDA is requested but not available.
        ConfigError: When the CPU is requested although torch sees a GPU.
    """
    check_device(device, has_gpu=torch.cuda.is_available())
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(rank % torch.cuda.device_count())
    found = torch.device("cuda", torch.cuda.current_device())
    if bind_numa:
        bind_to_numa_node(str(torch.cuda.get_device_properties(found).uuid))
    return found


def start_process_groups(
    rank: int, world_size: int, init_address: str, layout: LayoutConfig, timeout_s: float, seed: int = 0
) -> None:
    """Join the other ranks and creates Megatron's parallel groups.

    Args:
        rank: The rank of this process.
        world_size: The number of ranks.
        init_address: `host:port` where rank 0 listens, or a URL that torch.distributed supports; a single
            rank does not use it.
        layout: Parallel sizes.
        timeout_s: Longest wait in an exchange, seconds.
        seed: The seed of the generators for initialisation and dropout.

    Raises:
        EnvironmentNotReady: When the ranks cannot connect to each other.
    """
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    try:
        dist.init_process_group(
            backend,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
            **_meeting(rank, world_size, init_address, timeout_s),
        )
    except (RuntimeError, ValueError, OSError) as e:
        raise EnvironmentNotReady(
            f"trainer rank {rank} of {world_size} could not join the others at {init_address!r}: {e}"
        ) from e
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        # Only for a distributed optimizer that gathers its state on CPU, which ours does not.
        create_gloo_process_groups=False,
        # Else 30 minutes, whatever the limit is: ranks wait in these groups while one of them reads weights.
        distributed_timeout_minutes=math.ceil(timeout_s / 60),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def _meeting(rank: int, world_size: int, address: str, timeout_s: float) -> dict[str, Any]:
    """Return the arguments of `init_process_group` by which the ranks find each other."""
    if world_size == 1:
        return {"store": dist.HashStore()}
    if "://" in address:
        return {"init_method": address}
    host, _, port = address.rpartition(":")
    if rank == 0:
        return {"store": open_store(host, int(port), world_size, timeout_s)}
    limit = timedelta(seconds=timeout_s)
    return {"store": dist.TCPStore(host, int(port), world_size, is_master=False, timeout=limit)}


def stop_process_groups() -> None:
    """Clears Megatron's state of this process and leaves the process groups."""
    RouterReplay.clear_global_router_replay_instances()
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
