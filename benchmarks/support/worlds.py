"""The worlds of `benchmarks/scheduling.py`, and what all policies have in common."""

from __future__ import annotations

from abc import abstractmethod
from typing import Final

import msgspec
from msgspec.structs import replace

from async_rl.config import parse_config
from async_rl.engine_protocol import InterruptMode
from async_rl.planning.hardware import DEVICES, shape_of, speeds_on
from async_rl.planning.workload import Workload, fluid_rate
from benchmarks.support.tables import Row

SCALE: Final = 64
"""Real tokens for each simulated one."""

FIGURES: Final = (
    "relative",
    "trainer_idle",
    "staleness_mean",
    "staleness_p99",
    "staleness_max",
    "dropped",
    "masked",
    "prefilled",
    "ks",
)
"""What is measured of a policy, by the names of `JobPlan`."""


class Length(msgspec.Struct, frozen=True):
    """Length of a simulation."""

    versions: int
    warmup: int


class World(msgspec.Struct, frozen=True, kw_only=True):
    """What policies have to cope with."""

    name: str
    workload: Workload
    bounds: dict[int, int]
    """The bound of staleness, by the number of groups in a version."""
    engines: int = 8
    slots: int = 128
    group_size: int = 8
    per_slot: float = 1.0
    """Trajectories in flight for each slot: more than one where they wait for tools."""
    trainer_share: float = 0.5
    """The trainer's share of all devices, which is what colocated engines gain."""

    @property
    def in_flight(self) -> int:
        """Trajectories that are to keep all slots busy."""
        return round(self.engines * self.slots * self.per_slot)

    @property
    def fluid(self) -> float:
        """The fluid bound."""
        return fluid_rate(self.engines, self.slots, self.workload)

    def versions_of_longest(self, groups: int) -> float:
        """Return the versions of this number of groups that full engines make during the longest answer."""
        w = self.workload
        longest_s = w.max_tokens * w.step_s(self.slots) + (w.turns - 1) * w.tool_s
        return longest_s * self.fluid / (groups * self.group_size)

    def length(self, groups: int) -> Length:
        """Return the length of a simulation, which warms up for twice the longest answer."""
        warmup = int(2 * self.versions_of_longest(groups))
        return Length(versions=max(20, 2 * warmup), warmup=warmup)


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """A scheduler with its settings."""

    name: str
    bound: float | None = None
    """What it bounds staleness by; None takes the bound of the world."""
    only: tuple[tuple[str, int], ...] = ()
    """Names of worlds and groups in a version; nothing takes all worlds."""

    @property
    @abstractmethod
    def interrupts(self) -> InterruptMode | None:
        """What an update does to running calls; None where none is running."""

    @abstractmethod
    def run(self, world: World, groups: int, bound: float, seed: int, length: Length) -> Row:
        """Simulate the policy, and return its `FIGURES`."""


def merge_for(interrupt: InterruptMode | None) -> str | None:
    """Return the `routing.merge` that fits: engines that keep their KV cache keep its tokens' routing."""
    if interrupt is None:
        return None
    return "splice" if interrupt == "in_place" else "replace"


BASE: Final = World(name="base", workload=Workload(shares_prompts=False), bounds={128: 5, 32: 8})

_QWEN3_30B_A3B: Final = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
"""Source: config.json of huggingface.co/Qwen/Qwen3-30B-A3B."""
_QWEN3_PARAMETERS: Final = 30_532_122_624


def _on_h100() -> World:
    """Return `BASE` with Qwen3-30B-A3B on engines of 4 H100 and a trainer of 8.

    The cache of 128 calls, 90 GB, does not fit on 2 beside the weights. A step that recomputes activations
    then takes 0.92 of its fluid generation time.
    """
    config = parse_config(
        {
            "model": {"path": "none"},
            "data": {"path": "none"},
            "engine": {"num_engines": BASE.engines, "max_running_requests": BASE.slots, "tp_size": 4},
            "rollout": {"group_size": BASE.group_size},
            "weights": {"interrupt": "abort"},
            "trainer": {"groups_per_batch": 128, "num_ranks": 8, "recompute": "full"},
        }
    )
    shape = shape_of(_QWEN3_30B_A3B, _QWEN3_PARAMETERS)
    speeds = speeds_on(DEVICES["H100"], shape, config, BASE.workload)
    workload = replace(BASE.workload, **speeds)
    return replace(BASE, name="hardware", workload=workload, bounds={128: 5}, trainer_share=8 / 40)


WORLDS: Final = {
    world.name: world
    for world in (
        BASE,
        World(
            name="long_tail",
            workload=replace(BASE.workload, mean_tokens=4096.0, sigma=1.2),
            bounds={128: 5},
        ),
        World(
            name="long_prompts",
            workload=replace(BASE.workload, prompt_tokens=4096, sync_s=20.0),
            bounds={128: 5},
        ),
        World(
            name="small_engines",
            workload=BASE.workload,
            bounds={64: 4},
            engines=16,
            slots=64,
            group_size=16,
        ),
        # In the mean an answer is sampled for 157 s and waits 100 s for its tools.
        World(
            name="multi_turn",
            workload=replace(
                BASE.workload, turns=6, tool_tokens=256, tool_s=20.0, tool_sigma=1.2, tool_limit_s=600.0
            ),
            bounds={128: 5},
            per_slot=1.625,
        ),
        _on_h100(),
    )
}
"""By name."""
