"""What a weight update is expected to take: its parts, and the pause of an engine.

```
 distributed    gather ─► send ─► load     a bucket is gathered while the one before is sent and loaded
 tensor         gather ─────────► load     the same, through memory of the host, or on shared GPUs
 disk, delta    publish ────────► load     engines generate while files are written
```

This is arithmetic on rates of `Workload`. Interrupting and verifying, tens of milliseconds, are left out.
"""

from __future__ import annotations

from math import ceil
from typing import Final, NamedTuple

from async_rl.config import Config, SGLangEngines
from async_rl.engine_protocol import GLOO_PARTS
from async_rl.planning.workload import Workload
from async_rl.run.memory_estimate import num_senders

_MEMORY_BYTES_PER_S: Final = 10e9
"""What one process copies between a device and host memory: pages are not pinned."""

_DELTA_SHARE: Final = 0.1
"""Bytes of a delta over those of the model, at the small learning rates for which deltas are made."""


class UpdateEstimate(NamedTuple):
    """What an update is expected to take, seconds."""

    publish_s: float = 0.0
    gather_s: float = 0.0
    send_s: float = 0.0
    load_s: float = 0.0
    """Requests included."""
    rounds: int = 1
    """Requests of an engine: it receives a round of buckets, loads it and asks for the next one."""

    @property
    def pause_s(self) -> float:
        """Pause of an engine. Gathering runs beside the rest: the longer of both counts, and of the shorter
        one the round in which the other has nothing to do.
        """
        shorter, longer = sorted((self.gather_s, self.send_s + self.load_s))
        return longer + shorter / self.rounds

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of the parts that take time, named as in `UpdateCost.parts`."""
        names = ("publish", "gather", "send", "load")
        return {name: seconds for name, seconds in zip(names, self, strict=False) if seconds}

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in self.parts.items())
        return f"pause of an update {self.pause_s:.3g} s by arithmetic ({parts})"


def estimate_update(
    config: Config, workload: Workload, num_bytes: int, engines: int, gpus_per_node: int
) -> UpdateEstimate:
    """Return what bringing a version to all engines takes.

    Args:
        config: The run's config.
        workload: Its rates count.
        num_bytes: Size of a version.
        engines: Number of engines.
        gpus_per_node: Trainer ranks on a node; 0 if they are on CPUs, and then on one.
    """
    weights, engine, ranks = config.weights, config.engine, config.trainer.num_ranks
    # With `overlap` rank 0 has the copy.
    hosts = ceil(ranks / gpus_per_node) if gpus_per_node and not weights.overlap else 1
    if weights.transport == "disk":
        written_s = num_bytes / hosts / workload.disk_bytes_per_s
        return UpdateEstimate(publish_s=written_s, load_s=num_bytes / workload.disk_bytes_per_s)
    in_memory_s = num_bytes / _MEMORY_BYTES_PER_S
    if weights.transport == "delta":  # every host then copies the version before
        written_s = _DELTA_SHARE * num_bytes / hosts / workload.disk_bytes_per_s
        return UpdateEstimate(publish_s=written_s + in_memory_s, load_s=in_memory_s)
    if weights.transport == "tensor":
        rounds = max(1, ceil(num_bytes / weights.bucket_bytes))
        gathered_s, requested_s = num_bytes / workload.gather_bytes_per_s, rounds * workload.update_request_s
        if config.placement.shared and gpus_per_node:  # buckets stay on the GPU
            loaded_s = num_bytes / workload.load_bytes_per_s
            return UpdateEstimate(gather_s=gathered_s, load_s=loaded_s + requested_s, rounds=rounds)
        return UpdateEstimate(
            gather_s=gathered_s + in_memory_s, load_s=in_memory_s + requested_s, rounds=rounds
        )
    senders = num_senders(config, gpus_per_node)
    engines, tp_size, is_shared = 1 if weights.rolling else engines, 1, True
    if isinstance(engine, SGLangEngines):
        # As `EngineGroups` divides them: only patched servers share groups and receive from several senders.
        is_patched = not gpus_per_node or (config.routing.from_engine and engine.narrow_routing)
        is_shared = is_patched and not engine.urls and engine.urls_file is None
        tp_size = engine.tp_size
    width, groups = (senders, 1) if is_shared else (1, engines)
    rounds = max(1, ceil(num_bytes / senders / weights.bucket_bytes)) * senders // width
    bucket_s = num_bytes / rounds / width / workload.link_bytes_per_s
    received = num_bytes * workload.received_share
    return UpdateEstimate(
        gather_s=num_bytes / senders / workload.gather_bytes_per_s,
        send_s=broadcast_s(
            rounds,
            bucket_s,
            bucket_s * workload.received_share,
            receivers=engines * tp_size // groups,
            width=width,
            groups=groups,
            is_tree=not gpus_per_node,
        ),
        load_s=received / workload.load_bytes_per_s + rounds * workload.update_request_s,
        rounds=rounds,
    )


def broadcast_s(
    rounds: int,
    send_s: float,
    receive_s: float,
    *,
    receivers: int,
    width: int,
    groups: int = 1,
    is_tree: bool,
) -> float:
    """Return the seconds in which rounds of broadcasts arrive.

    Args:
        rounds: Broadcasts of a sender, one after the other.
        send_s: Seconds in which a process sends a bucket once.
        receive_s: Seconds in which it receives one.
        receivers: Ranks in a group beside its sender.
        width: Senders of a round. A receiver has another rank in the group of each.
        groups: Groups of one sender, each of which gets the bucket.
        is_tree: Whether ranks pass whole parts of buckets on, as Gloo's do; NCCL's pass on what arrives.

    **Source**: gloo/broadcast.cc. Rank r sends to each r + 2^i with 2^i > r. The last rank that a bucket
    reaches has it by way of ranks 0, 1, 3, 7 and so on, which send the most.
    """
    sent, passed_on, path = 1, 0, 0
    if is_tree:
        world = receivers + 1
        sent = _num_children(0, world)
        passed_on = sum(_num_children(1 + number * receivers // width, world) for number in range(width))
        path = sum(_num_children(2**hop - 1, world) for hop in range(1, world.bit_length()))
    busiest_s = max(sent * groups * send_s, passed_on * send_s, width * receive_s)
    return rounds * busiest_s + path * send_s / GLOO_PARTS


def _num_children(rank: int, world: int) -> int:
    return sum(rank < 1 << step and rank + (1 << step) < world for step in range(world.bit_length()))
