"""Seeing which row reached which token in which router, without trusting who put it there.

Every valid (token, layer) of a batch gets its own set of experts (`distinct_rows`). A `RouterWitness` notes
what each router call got for input and which experts it took. A token is recognised in a call by its hidden
state, which one rank without any slicing has seen before (`hidden_states`); the experts it was sent to must
then be its own.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch

from async_rl.types import TrainBatch
from tests.support.trainers import place
from trainer.megatron.replay import TopKRouter
from trainer.worker import TrainerWorker

SAME = 1e-2
"""Distance of a token's hidden state to itself in another layout: above rounding, far below all others."""


def distinct_rows(batch: TrainBatch, layers: int, experts: int, top_k: int, seed: int = 0) -> TrainBatch:
    """A batch whose rows are a different set of experts for every token and layer.

    Its trajectories begin with different tokens: no two positions have the same past.
    """
    sets = np.array(list(itertools.combinations(range(experts), top_k)), np.uint8)
    count = batch.num_tokens * layers
    assert count <= len(sets), f"{len(sets)} sets of experts for {count} rows"
    chosen = np.random.default_rng(seed).permutation(len(sets))[:count]
    tokens = batch.token_ids.copy()
    tokens[batch.offsets[:-1]] = 3 + np.arange(batch.num_trajectories)
    return msgspec.structs.replace(
        batch,
        token_ids=tokens,
        routed_experts=sets[chosen].reshape(batch.num_tokens, layers, top_k),
        num_experts=experts,
    )


@dataclass
class RouterCall:
    """One call of a router."""

    layer: int  # counted from 1
    hidden: torch.Tensor  # [tokens, hidden]
    taken: torch.Tensor  # [tokens, experts] bool
    excluded: torch.Tensor  # [tokens] bool, what it must leave out of its counters and losses


@dataclass
class RouterWitness:
    """All router calls of a worker while it watches."""

    calls: list[RouterCall] = field(default_factory=list)

    @contextlib.contextmanager
    def watching(self, worker: TrainerWorker) -> Iterator[RouterWitness]:
        """Watch while the block runs."""

        def note(router: TopKRouter, inputs: tuple, outputs: tuple) -> None:
            hidden = inputs[0].detach().flatten(0, 1).float().clone()
            taken, excluded = outputs[1].detach().bool().clone(), inputs[1].flatten()
            self.calls.append(RouterCall(router.layer_number, hidden, taken, excluded))

        modules = [m for chunk in worker.model.chunks for m in chunk.modules()]
        hooks = [m.register_forward_hook(note) for m in modules if isinstance(m, TopKRouter)]
        try:
            yield self
        finally:
            for hook in hooks:
                hook.remove()

    def maps(self) -> Counter[tuple[int, bytes]]:
        """How often each layer took each choice for a whole micro-batch."""
        return Counter((call.layer, call.taken.numpy().tobytes()) for call in self.calls)

    def deliveries(
        self, batch: TrainBatch, hidden: dict[int, torch.Tensor]
    ) -> tuple[Counter[tuple[int, int]], int]:
        """Which (layer, token) was sent to its own experts how often, and how often something was wrong.

        Wrong is a valid token that was sent elsewhere or left out, and a token without a row that counted.

        Args:
            batch: With distinct rows.
            hidden: What `hidden_states` gave for it.
        """
        right: Counter[tuple[int, int]] = Counter()
        wrong = 0
        column = {layer: i for i, layer in enumerate(sorted(hidden))}
        for call in self.calls:
            distance, token = torch.cdist(call.hidden, hidden[call.layer]).min(dim=1)
            for near, j, taken, excluded in zip(
                distance.tolist(), token.tolist(), call.taken, call.excluded.tolist(), strict=True
            ):
                if near > SAME or not batch.routing_valid[j]:  # padding, or a token that was never fed
                    wrong += not excluded
                    continue
                wrong += excluded
                own = np.sort(batch.routed_experts[j, column[call.layer]])
                if np.array_equal(taken.nonzero()[:, 0].numpy(), own):
                    right[call.layer, j] += 1
                else:
                    wrong += 1
        return right, wrong


def hidden_states(worker: TrainerWorker, batch: TrainBatch) -> dict[int, torch.Tensor]:
    """What each router sees of each token under the batch's rows, `[S, hidden]` by layer; one rank alone."""
    with RouterWitness().watching(worker) as checker:
        worker.compute_old_log_probs(place(worker, batch), batch.num_tokens)
    states = {call.layer: call.hidden for call in checker.calls}
    assert len(states) == len(checker.calls), "give the worker a budget that takes the whole batch at once"
    for layer, hidden in states.items():
        gaps = torch.cdist(hidden, hidden).fill_diagonal_(torch.inf)
        assert gaps.min() > 10 * SAME, f"two tokens look alike to layer {layer}"
    return states


def expected_deliveries(batch: TrainBatch, layers: list[int], passes: int) -> Counter[tuple[int, int]]:
    """What `deliveries` should add up to over all ranks."""
    return Counter({(layer, int(j)): passes for layer in layers for j in np.flatnonzero(batch.routing_valid)})
