"""Routers without a model, for fast tests of routing replay."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.megatron import replay
from trainer.megatron.replay import RouterReplay, RouterReplayAdapter


def bare_config(**fields: Any) -> SimpleNamespace:
    """Return the fields that replay reads of a model's config: layers 1 and 4 of five have 300 experts."""
    return SimpleNamespace(
        **{
            "num_layers": 5,
            "moe_layer_freq": [0, 1, 0, 0, 1],
            "num_moe_experts": 300,
            "moe_router_topk": 2,
            "recompute_granularity": None,
            "moe_router_fusion": False,
            "moe_router_load_balancing_type": "none",
            "moe_expert_capacity_factor": None,
            "moe_enable_routing_replay": True,
        }
        | fields
    )


def bare_adapter(
    patch: pytest.MonkeyPatch, config: SimpleNamespace, device: str = "cpu"
) -> RouterReplayAdapter:
    """Return an adapter for the two routers of `bare_config`, on a device."""
    routers = [SimpleNamespace(layer_number=n, router_replay=RouterReplay()) for n in (2, 5)]
    patch.setattr(replay, "decoder_routers", lambda chunk: routers)
    return RouterReplayAdapter([torch.nn.Module()], config, torch.device(device))  # type: ignore[arg-type]


def top_k(scores: torch.Tensor, k: int, **_: Any) -> Any:
    """Return a router's own choice."""
    return scores.topk(k)
