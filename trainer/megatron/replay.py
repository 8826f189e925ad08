"""Routing replay (R3): the engine's choice of experts, repeated in the trainer.

```
TrainBatch.routed_experts [S, L_moe, K] uint8 ─ check_rows ─► per micro-batch, per sequence-parallel slice
    ─► RouterReplayAdapter.micro_batch ─► one target a router ─► gate weights gathered from current scores
```

Megatron-Core's own `RouterReplay` does the replaying; its rows are local tokens of local routers, it
validates nothing, knows no token without a row, and leaves bookkeeping to the caller. This module adds these:

- Routers are addressed by `layer_number`, never by their place in Megatron's global list, which has other
  orders with dense layers, pipeline stages or a second model in the process.
- A token without a valid row (`NATIVE` in every column) takes the router's own choice.
- Targets are queued for the backward pass only where it will route again (recomputation), and a schedule that
  leaves one unused, or lets one leak from a forward-only pass, ends in an error.

Source: arXiv 2510.11370 (R3); megatron/core/transformer/moe/router_replay.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_attr_wrapped_model

from async_rl.errors import AlignmentError, ConfigError
from async_rl.types import BoolArray, ExpertIdArray, Int64Array

NATIVE = -1
"""Expert id of a target row that does not exist. It lives only here, in signed targets of one micro-batch;
rows on the wire are unsigned and carry a bitmap."""

_MIN_ROWS_TOP1 = 32
"""With one expert a token, a short trajectory may well send every token to expert 0; a long one does not."""


class MaskedRouterReplay(RouterReplay):
    """Megatron's replay of one router, with native routing where a row is `NATIVE`.

    Invariant: `replay_backward_list` holds one target for each forward pass whose backward pass is still to
    come and will call the router again.
    """

    def __init__(self, layer_number: int) -> None:
        super().__init__()
        self.layer_number = layer_number

    def set_target_indices(self, topk_indices: torch.Tensor, *, recomputed: bool = False) -> None:
        """Take `[tokens, K] int64` for the next forward pass and, if there will be one, its recomputation."""
        self.target_topk_idx = topk_indices
        if recomputed:
            self.replay_backward_list.append(topk_indices)

    def get_replay_topk(  # noqa: D102 - Megatron's contract
        self, scores, topk, num_groups=None, group_topk=None, default_compute_topk=None
    ):
        if self.router_replay_action is RouterReplayAction.REPLAY_FORWARD:
            ids = self.target_topk_idx
        elif self.router_replay_action is RouterReplayAction.REPLAY_BACKWARD:
            if not self.replay_backward_list:
                raise AlignmentError(
                    f"layer {self.layer_number}: the router was called without a replay target"
                )
            ids = self.replay_backward_list.pop(0)
        else:
            return super().get_replay_topk(scores, topk, num_groups, group_topk, default_compute_topk)
        if ids is None or ids.shape != (scores.shape[0], topk):
            raise AlignmentError(
                f"layer {self.layer_number}: the router sees {scores.shape[0]} tokens and picks {topk} "
                f"experts, but its replay target is {None if ids is None else tuple(ids.shape)}"
            )
        native = ids[:, :1] == NATIVE
        if native.any():
            _, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
            ids = torch.where(native, own, ids)
        return scores.gather(1, ids), ids


class RouterReplayAdapter:
    """Feeds the routers of one rank's model chunks.

    Example:
        >>> with replay.schedule():                     # around forward_backward_func
        ...     with replay.micro_batch(rows, valid):   # around one chunk's forward pass
        ...         logits = model(...)
    """

    def __init__(self, chunks: list[torch.nn.Module], config: TransformerConfig) -> None:
        """Take over the replay of every router in `chunks`.

        Raises:
            ConfigError: When there is nothing to replay, or the router would ignore or override it.
        """
        _check_config(config)
        self.moe_layers = moe_layer_numbers(config)
        self._column = {number: column for column, number in enumerate(self.moe_layers)}
        self._recomputes = config.recompute_granularity is not None
        self._routers = [self._take_over(router) for chunk in chunks for router in _routers(chunk)]

    @staticmethod
    def _take_over(router: TopKRouter) -> MaskedRouterReplay:
        """Put our replay in the place of Megatron's, also in its global list."""
        instances = RouterReplay.global_router_replay_instances
        instances.remove(router.router_replay)
        router.router_replay = MaskedRouterReplay(router.layer_number)  # appends itself to the list
        return router.router_replay

    @property
    def routers(self) -> tuple[MaskedRouterReplay, ...]:
        """This rank's routers, in the order of their layers."""
        return tuple(self._routers)

    @contextlib.contextmanager
    def micro_batch(self, targets: torch.Tensor) -> Iterator[None]:
        """Replay during one forward pass.

        Args:
            targets: `[tokens, L_moe, K]` int64 on the device, this rank's tokens in the order its routers see
                them, all MoE layers of the model; `NATIVE` throughout a token without a row.
        """
        recomputed = self._recomputes and torch.is_grad_enabled()
        for router in self._routers:
            router.set_target_indices(targets[:, self._column[router.layer_number]], recomputed=recomputed)
            router.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        try:
            yield
        finally:
            for router in self._routers:
                router.target_topk_idx = None
                # Until the next forward pass only a recomputation can call the router.
                router.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)

    @contextlib.contextmanager
    def schedule(self) -> Iterator[None]:
        """Enclose all forward and backward passes of one schedule.

        Raises:
            AlignmentError: When targets are left over, at its start or at its end: gradients would be wrong.
        """
        self._expect_empty("before a schedule")
        try:
            yield
            self._expect_empty("after a schedule")
        finally:
            for router in self._routers:
                router.clear_indices()
                router.clear_router_replay_action()

    def _expect_empty(self, when: str) -> None:
        left = {r.layer_number: len(r.replay_backward_list) for r in self._routers if r.replay_backward_list}
        if left:
            raise AlignmentError(f"{when} replay targets are left over (layer: count): {left}")


def moe_layer_numbers(config: TransformerConfig) -> tuple[int, ...]:
    """Numbers (from 1) of the layers with experts in the whole model, ascending; MTP layers excluded."""
    pattern = config.moe_layer_freq
    if isinstance(pattern, int):
        pattern = [int(i % pattern == 0) for i in range(config.num_layers)]
    if config.num_moe_experts is None:
        return ()
    return tuple(i + 1 for i, sparse in enumerate(pattern) if sparse)


def to_targets(rows: ExpertIdArray, valid: BoolArray, device: torch.device) -> torch.Tensor:
    """Rows of one micro-batch's local tokens, `[t, L_moe, K]` unsigned, as int64 targets on the device.

    The unsigned rows travel; they widen where they arrive.
    """
    ids = torch.from_numpy(np.ascontiguousarray(rows)).to(device).long()
    if not valid.all():
        ids[torch.from_numpy(~valid).to(device)] = NATIVE
    return ids


def check_rows(
    rows: ExpertIdArray | None,
    valid: BoolArray | None,
    offsets: Int64Array,
    num_experts: int,
    config: TransformerConfig,
    trajectories: list[int] | range | None = None,
) -> None:
    """Check routing rows before anything is trained on them.

    Args:
        rows: `[S, L_moe, K]` uint8 or uint16.
        valid: `[S]`.
        offsets: `[N + 1]`, the bounds of the trajectories.
        num_experts: What the batch says the model has.
        config: What the model has.
        trajectories: Which to look at; None looks at all.

    Raises:
        AlignmentError: With the first thing that is wrong, and where.
    """
    if rows is None or valid is None:
        raise AlignmentError("routing.replay is r3, but the batch carries no routing rows")
    layers = moe_layer_numbers(config)
    expected = (int(offsets[-1]), len(layers), config.moe_router_topk)
    if rows.shape != expected or valid.shape != expected[:1]:
        raise AlignmentError(
            f"routing rows are {rows.shape} with {valid.shape} valid flags, expected [tokens, MoE layers, "
            f"experts a token] = {expected}"
        )
    if rows.dtype not in (np.uint8, np.uint16):
        raise AlignmentError(f"routing rows are {rows.dtype}, expected uint8 or uint16")
    if num_experts != config.num_moe_experts:
        raise AlignmentError(
            f"routing rows are of a model with {num_experts} experts, but the trainer's has "
            f"{config.num_moe_experts}"
        )
    for j in range(len(offsets) - 1) if trajectories is None else trajectories:
        start, end = int(offsets[j]), int(offsets[j + 1])
        if start == end:
            continue
        if valid[end - 1]:
            raise AlignmentError(
                f"trajectory {j} has {end - start} tokens and as many routing rows, expected one less: its "
                "last token was never fed. Rows of several segments laid end to end look like this"
            )
        _check_trajectory(rows[start:end][valid[start:end]], j, layers, config)


def _check_trajectory(
    rows: ExpertIdArray, j: int, layers: tuple[int, ...], config: TransformerConfig
) -> None:
    """Check one trajectory's valid rows, `[rows, L_moe, K]`."""
    if not len(rows):
        return
    if rows.max() >= config.num_moe_experts:
        raise AlignmentError(
            f"trajectory {j} has expert id {rows.max()}, expected below {config.num_moe_experts}"
        )
    top_k = rows.shape[2]
    if top_k > 1 or len(rows) >= _MIN_ROWS_TOP1:
        empty = ~rows.any(axis=(0, 2))
        if empty.any():
            number = layers[int(empty.argmax())]
            raise AlignmentError(
                f"trajectory {j} has only zeros in layer {number - 1} over all its {len(rows)} rows: the "
                "engine did not record that layer"
            )
    ordered = np.sort(rows, axis=2)
    twice = (ordered[..., 1:] == ordered[..., :-1]).any(axis=2)
    if twice.any():
        row, column = np.argwhere(twice)[0]
        raise AlignmentError(
            f"trajectory {j}, valid row {row}, layer {layers[column] - 1} names an expert twice: "
            f"{rows[row, column].tolist()}"
        )


def _check_config(config: TransformerConfig) -> None:
    if not moe_layer_numbers(config):
        raise ConfigError("routing.replay is r3, but the model has no experts: set routing.replay=off")
    for field, wrong, reason in (
        (
            "moe_router_fusion",
            config.moe_router_fusion,
            "the fused router returns before it looks at the replay",
        ),
        (
            "moe_router_load_balancing_type",
            config.moe_router_load_balancing_type == "sinkhorn",
            "sinkhorn routing ignores the replay",
        ),
        (
            "moe_expert_capacity_factor",
            config.moe_expert_capacity_factor is not None,
            "a capacity drops replayed experts again",
        ),
        (
            "moe_enable_routing_replay",
            not config.moe_enable_routing_replay,
            "the routers were built without a replay",
        ),
    ):
        if wrong:
            raise ConfigError(f"routing.replay is r3, but {field} is {getattr(config, field)!r}: {reason}")


def _routers(chunk: torch.nn.Module) -> list[TopKRouter]:
    """The routers of a chunk's decoder; those of multi-token prediction are not the engine's."""
    layers = get_attr_wrapped_model(chunk, "decoder").layers
    return [layer.mlp.router for layer in layers if isinstance(layer.mlp, MoELayer)]
