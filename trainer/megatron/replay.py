"""Routing replay: the trainer repeats expert choices made by the engine (R3) or by an earlier pass (R2).

```
R3  TrainBatch.routed_experts [S, L_moe, K] ─ check_rows ─► local_rows: this rank's tokens and layers ─┐
R2  old-log-prob pass ─► RouterReplayAdapter.record ─► one copy a micro-batch off the device ──────────┤
                                                                      ReplayRows: unsigned, pinned     │
    to the device, still unsigned ◄─ RouterReplayAdapter.micro_batch ◄─────────────────────────────────┘
        ─► a target for each router ─► int64 while it runs ─► gate weights gathered from current scores
```

Megatron-Core's `RouterReplay` performs the replay. Its rows are those of local tokens and local routers; it
validates nothing, has no tokens without a row, and leaves bookkeeping to the caller. This module adds the
following:

- Routers are addressed by chunk and `layer_number`, not by their position in Megatron's global list, whose
order
  differs with dense layers, pipeline stages, multi-token prediction or a second model in the process.
- A token without a valid row uses the router's own choice.
- A target is used exactly once by the forward pass, and exactly once more by the backward pass if that routes
again
  (recomputation). A schedule raises an error when a target is left over, missing, or leaks from a
  forward-only pass.

Source: arXiv 2510.11370 (R3), arXiv 2507.18071 (R2); megatron/core/transformer/moe/router_replay.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_attr_wrapped_model

from async_rl.errors import AlignmentError, ConfigError
from async_rl.types import BoolArray, ExpertIdArray, Int64Array, TrainBatch
from trainer.megatron.activation_offload import copy_to_host

Output = TypeVar("Output")


class ReplayRows(NamedTuple):
    """The rows of one micro-batch for one model chunk: this rank's tokens, in the order its routers see them.

    They are on the host, in pinned memory if there is a GPU.
    """

    ids: torch.Tensor  # [tokens, MoE layers of the chunk, K] uint8 or uint16
    known: torch.Tensor | None  # [tokens] bool, True for tokens with a row; None: all tokens


class ReplayTarget(NamedTuple):
    """The choice that one router repeats, on the device; it stays unsigned until the router runs."""

    ids: torch.Tensor  # [tokens, K] unsigned
    known: torch.Tensor | None  # [tokens] bool


class MaskedRouterReplay(RouterReplay):
    """Megatron's replay of one router, with native routing for tokens without a row.

    Invariant: `replay_backward_list` holds one target for each forward pass whose pending backward pass will
    call the router again; the next forward call consumes `target_topk_idx`.
    """

    def __init__(self, layer_number: int) -> None:
        super().__init__()
        self.layer_number = layer_number

    def set_target_indices(
        self, topk_indices: torch.Tensor, known: torch.Tensor | None = None, *, recomputed: bool = False
    ) -> None:
        """Set `[tokens, K]` ids for the next forward pass and, with `recomputed`, its recomputation."""
        self.target_topk_idx = ReplayTarget(topk_indices, known)
        if recomputed:
            self.replay_backward_list.append(self.target_topk_idx)

    def record_into(self, place: torch.Tensor) -> None:
        """Make the next forward pass write its own choice to `place`, `[tokens, K]` unsigned."""
        self.recorded_topk_idx = place
        self.set_router_replay_action(RouterReplayAction.RECORD)

    def record_indices(self, topk_indices: torch.Tensor) -> None:  # noqa: D102 - Megatron's contract
        place, self.recorded_topk_idx = self.recorded_topk_idx, None
        if place is None or place.shape != topk_indices.shape:
            raise AlignmentError(
                f"layer {self.layer_number}: the router chose {tuple(topk_indices.shape)} experts, expected "
                f"{'no call' if place is None else tuple(place.shape)} while recording"
            )
        place.copy_(topk_indices)  # narrows on the device

    def get_replay_topk(  # noqa: D102 - Megatron's contract
        self, scores, topk, num_groups=None, group_topk=None, default_compute_topk=None
    ):
        own = partial(default_compute_topk, scores, topk, num_groups=num_groups, group_topk=group_topk)
        match self.router_replay_action:
            case RouterReplayAction.REPLAY_FORWARD:
                target, self.target_topk_idx = self.target_topk_idx, None
            case RouterReplayAction.REPLAY_BACKWARD:
                target = self.replay_backward_list.pop(0) if self.replay_backward_list else None
            case RouterReplayAction.RECORD:
                values, ids = own()
                self.record_indices(ids)
                return values, ids
            case _:
                return own()
        if target is None:
            raise AlignmentError(f"layer {self.layer_number}: the router was called without a replay target")
        if target.ids.shape != (scores.shape[0], topk):
            raise AlignmentError(
                f"layer {self.layer_number}: the router sees {scores.shape[0]} tokens and picks {topk} "
                f"experts, but its replay target is {tuple(target.ids.shape)}"
            )
        ids = target.ids.long()
        if target.known is not None:
            with torch.no_grad():
                ids = torch.where(target.known[:, None], ids, own()[1])
        return scores.gather(1, ids), ids


class RouterReplayAdapter:
    """Provides the routers of one rank's model chunks with replay targets, and records their choices."""

    def __init__(
        self, chunks: list[torch.nn.Module], config: TransformerConfig, device: torch.device | None = None
    ) -> None:
        """Replace Megatron's replay of every router in `chunks`.

        Args:
            chunks: This rank's parts of the model, in order.
            config: The model's config.
            device: The device of the routers; None is the CPU.

        Raises:
            ConfigError: When the model has no routers, or they would ignore or override a replay.
        """
        check_replayable(config)
        self._config, self._device = config, device or torch.device("cpu")
        column = {number: i for i, number in enumerate(moe_layer_numbers(config))}
        self._chunks = [[self._take_over(router) for router in decoder_routers(chunk)] for chunk in chunks]
        self.columns = tuple(_span([column[r.layer_number] for r in routers]) for routers in self._chunks)
        """Which of the model's MoE layers each chunk holds."""

    @staticmethod
    def _take_over(router: TopKRouter) -> MaskedRouterReplay:
        """Replace Megatron's replay object of a router, also in Megatron's global list."""
        instances = RouterReplay.global_router_replay_instances
        instances.remove(router.router_replay)
        router.router_replay = MaskedRouterReplay(router.layer_number)  # appends itself to the list
        return router.router_replay

    @property
    def routers(self) -> tuple[MaskedRouterReplay, ...]:
        """This rank's routers, chunk by chunk."""
        return tuple(router for routers in self._chunks for router in routers)

    @contextlib.contextmanager
    def replay_micro_batch(self, chunk: int, rows: ReplayRows) -> Iterator[None]:
        """Replay rows during one forward pass of a chunk.

        Raises:
            AlignmentError: When the rows have the wrong layers or tokens, or a router was not called.
        """
        routers = self._chunks[chunk]
        if rows.ids.shape[1] != len(routers):
            raise AlignmentError(
                f"chunk {chunk} has {len(routers)} routers, but its rows are of {rows.ids.shape[1]} layers"
            )
        # Copies from pinned memory are asynchronous: neither the host nor the device waits.
        ids = rows.ids.to(self._device, non_blocking=True)
        known = None if rows.known is None else rows.known.to(self._device, non_blocking=True)
        recomputed = torch.is_grad_enabled() and _routes_again(self._config)
        for column, router in enumerate(routers):
            router.set_target_indices(ids[:, column], known, recomputed=recomputed)
            router.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        try:
            yield
            _expect_called(r.layer_number for r in routers if r.target_topk_idx is not None)
        finally:
            for router in routers:
                router.target_topk_idx = None
                # Until the next forward pass only a recomputation can call the router.
                router.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)

    def record_micro_batch(
        self, chunk: int, tokens: int, forward: Callable[[], Output]
    ) -> tuple[Output, ReplayRows]:
        """Records the choices of a chunk's routers in one forward pass without gradients.

        The choices of all layers are narrowed into one tensor on the device, which one asynchronous copy
        moves to the host. That copy is ordered before the copy back for the replay; code that reads the rows
        on the host must synchronise first.

        Args:
            chunk: Index of the chunk.
            tokens: The number of tokens that its routers see.
            forward: Runs the forward pass.

        Raises:
            AlignmentError: When a router saw another number of tokens, or was not called exactly once.
        """
        assert not torch.is_grad_enabled(), "a recomputation would record twice"
        routers, config = self._chunks[chunk], self._config
        narrow = torch.uint8 if config.num_moe_experts <= 256 else torch.uint16
        staged = torch.empty(tokens, len(routers), config.moe_router_topk, dtype=narrow, device=self._device)
        for column, router in enumerate(routers):
            router.record_into(staged[:, column])
        try:
            output = forward()
            _expect_called(r.layer_number for r in routers if r.recorded_topk_idx is not None)
        finally:
            for router in routers:
                router.clear_indices()
                router.clear_router_replay_action()
        return output, ReplayRows(staged if staged.device.type == "cpu" else copy_to_host(staged), None)

    @contextlib.contextmanager
    def guard_schedule(self) -> Iterator[None]:
        """Encloses all forward and backward passes of one schedule.

        Raises:
            AlignmentError: When targets are left over at its start or end, which would make gradients wrong.
        """
        self._expect_empty("before a schedule")
        try:
            yield
            self._expect_empty("after a schedule")
        finally:
            for router in self.routers:
                router.clear_indices()
                router.clear_router_replay_action()

    def _expect_empty(self, when: str) -> None:
        left = {r.layer_number: len(r.replay_backward_list) for r in self.routers if r.replay_backward_list}
        if left:
            raise AlignmentError(f"{when} replay targets are left over (layer: count): {left}")


def moe_layer_numbers(config: TransformerConfig) -> tuple[int, ...]:
    """Return the numbers (from 1) of the model's layers with experts, ascending, without MTP layers."""
    pattern = config.moe_layer_freq
    if isinstance(pattern, int):
        pattern = [int(i % pattern == 0) for i in range(config.num_layers)]
    if config.num_moe_experts is None:
        return ()
    return tuple(i + 1 for i, sparse in enumerate(pattern) if sparse)


def local_rows(
    rows: ExpertIdArray, valid: BoolArray, source: Int64Array, columns: slice, device: torch.device
) -> ReplayRows:
    """Select the rows that one chunk of one rank replays from a batch's rows, before anything is copied.

    Args:
        rows: `[S, L_moe, K]` uint8 or uint16, the batch's rows.
        valid: `[S]`, True for tokens with a valid row.
        source: `[tokens]`, the index in the batch of each token that the routers will see, -1 where padded.
        columns: The chunk's part of the L_moe layers.
        device: The device that will replay them; rows for a GPU are pinned.
    """
    index = np.maximum(source, 0)
    known = (source >= 0) & valid[index]
    ids, flags = torch.from_numpy(rows[:, columns][index]), torch.from_numpy(known)
    if device.type == "cuda":
        ids, flags = ids.pin_memory(), flags.pin_memory()
    return ReplayRows(ids, None if known.all() else flags)


def check_rows(batch: TrainBatch, config: TransformerConfig) -> None:
    """Check that a batch's routing rows are of the model that is to repeat them.

    Raises:
        AlignmentError: When there are none, or they are of another model.
    """
    rows = batch.routed_experts
    if rows is None:
        raise AlignmentError("routing.replay is r3, but the batch carries no routing rows")
    layers = tuple(number - 1 for number in moe_layer_numbers(config))
    expected = config.num_moe_experts, layers, (len(layers), config.moe_router_topk)
    if (found := (batch.num_experts, batch.moe_layers, rows.shape[1:])) != expected:
        raise AlignmentError(
            "routing rows are of another model than the trainer's: experts, layers with experts and "
            f"shape of a row are {found}, expected {expected}"
        )


def check_replayable(config: TransformerConfig) -> None:
    """Check that a model's routers can replay a choice.

    Raises:
        ConfigError: When the model has no routers, or they would ignore or override a replay.
    """
    if not moe_layer_numbers(config):
        raise ConfigError("routing.replay is on, but the model has no experts: set routing.replay=off")
    for field, wrong, reason in (
        (
            "moe_router_fusion",
            config.moe_router_fusion,
            "the fused router bypasses the replay",
        ),
        (
            "moe_router_load_balancing_type",
            "sinkhorn" in config.moe_router_load_balancing_type,  # a name, or a list of names
            "sinkhorn routing ignores the replay",
        ),
        (
            "moe_expert_capacity_factor",
            config.moe_expert_capacity_factor is not None,
            "a capacity limit drops replayed experts",
        ),
        (
            "moe_enable_routing_replay",
            not config.moe_enable_routing_replay,
            "the routers were built without a replay",
        ),
    ):
        if wrong:
            raise ConfigError(f"routing.replay is on, but {field} is {getattr(config, field)!r}: {reason}")


def _routes_again(config: TransformerConfig) -> bool:
    """Whether the backward pass calls the routers again, for recomputation."""
    if config.recompute_granularity == "selective":
        return "moe" in config.recompute_modules
    return config.recompute_granularity == "full"


def decoder_routers(chunk: torch.nn.Module) -> list[TopKRouter]:
    """Return the routers of a chunk's decoder, without those of multi-token prediction."""
    layers = get_attr_wrapped_model(chunk, "decoder").layers
    return [layer.mlp.router for layer in layers if isinstance(layer.mlp, MoELayer)]


def _span(columns: list[int]) -> slice:
    """Return consecutive columns as a slice, which selects layers without a copy."""
    first = columns[0] if columns else 0
    assert columns == list(range(first, first + len(columns))), f"a chunk holds the MoE layers {columns}"
    return slice(first, first + len(columns))


def _expect_called(left: Iterable[int]) -> None:
    if layers := list(left):
        raise AlignmentError(f"the routers of the layers {layers} were not called in their forward pass")
