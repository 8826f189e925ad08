"""One rank of the trainer: `TrainerWorker` turns batches of trajectories into new weights.

```
train_step(batch) ─ check routing rows ─ plan updates and micro-batches
    ─► [log-probs of the proximal and the reference policy: forward only] ─► advantages
    ─► for each update: forward and backward over micro-batches, rows replayed
                         ─► finite, and no spike? ─► optimizer step, or skipped and counted
    ─► metrics agreed
```

What a token counts depends on the update's trajectories alone (`objectives.token_weights`), so the loss does
not depend on how they were cut into micro-batches and shared out over ranks.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from async_rl.codec import read_frame
from async_rl.config import Config, parse_config
from async_rl.engine_protocol import GroupInvite, TensorSpec
from async_rl.errors import NonFiniteLoss
from async_rl.trainer_protocol import Saved, StepResult, TrainerState
from async_rl.types import Float32Array, Int64Array, TrainBatch
from trainer import logprob_mismatch
from trainer.checkpoints import loading
from trainer.checkpoints.saving import Saver, saver_of
from trainer.collectives import raise_on_all_ranks
from trainer.losses.advantages import estimate_advantages, longest_answers, overlong_penalty
from trainer.losses.kl import kl_estimate
from trainer.losses.log_probs import vocab_parallel_log_probs
from trainer.losses.objectives import token_weights
from trainer.losses.policy_loss import SUMS, TrainedTokens, means, policy_sums
from trainer.losses.sequences import Sequences
from trainer.megatron.model import Inputs, LossFunction, MegatronModel
from trainer.megatron.offload import Offload, memory_saver
from trainer.megatron.packing import (
    MicroBatch,
    Targets,
    level,
    pack,
    plan_micro_batches,
    split_updates,
    targets,
)
from trainer.megatron.process_groups import choose_device, start_process_groups, stop_process_groups
from trainer.megatron.replay import check_rows
from trainer.weights.snapshot import WeightSnapshot, beside_training
from trainer.weights.weight_export import WeightExport
from trainer.weights.weight_manifest import check_exported, served_specs

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Placed:
    """One micro-batch on this rank."""

    inputs: Inputs
    logits_of: torch.Tensor  # [n] int64, rows of the logits that are trained on
    tokens: Int64Array  # [n] their indices in the batch, at the predicting position
    labels: torch.Tensor  # [n] int64


@dataclass(frozen=True)
class UpdateInputs:
    """What the updates of a batch are to do, at the predicting positions; `[S]` each."""

    wanted: Targets
    advantages: Float32Array
    old: Float32Array | None
    """Log-probs of the proximal policy, this rank's tokens only; None takes the engine's."""
    reference: Float32Array | None


class TrainerWorker:
    """`async_rl.trainer_protocol.TrainerRank` on Megatron-Core."""

    def __init__(self, config: dict[str, Any], rank: int, world_size: int, init_address: str) -> None:
        """Take the whole run config as plain values; nothing is built yet."""
        self._config: Config = parse_config(config)
        self._rank, self._world_size, self._init_address = rank, world_size, init_address
        self._steps = self._skipped = 0
        self._model: MegatronModel | None = None
        self._snapshot: WeightSnapshot | None = None
        self._saver: Saver | None = None
        self._offload: Offload | None = None
        self._weights: WeightExport | None = None

    @property
    def model(self) -> MegatronModel:
        """The model, once `setup` has built it."""
        assert self._model is not None, "setup comes first"
        return self._model

    @property
    def weights(self) -> WeightExport:
        """What engines get of the model, likewise."""
        assert self._weights is not None, "setup comes first"
        return self._weights

    def setup(self, checkpoint_dir: str | None) -> TrainerState:
        """Join the other ranks, build the model and load the newest checkpoint of a folder, if there is one.

        Args:
            checkpoint_dir: A folder of checkpoints, which may be empty or missing, or one checkpoint itself;
                None starts from the model's own weights.

        Raises:
            ConfigError: When model, layout and routing replay do not go together.
            EnvironmentNotReady: When the ranks do not find each other.
            CheckpointError: When the checkpoint cannot be loaded.
        """
        config, trainer = self._config, self._config.trainer
        device = choose_device(trainer.device, self._rank)
        saver = memory_saver() if config.placement.shared and device.type == "cuda" else None
        start_process_groups(
            self._rank,
            self._world_size,
            self._init_address,
            trainer.layout,
            timeout_s=max(trainer.start_timeout_s, trainer.step_timeout_s),
            seed=config.run.seed,
        )
        self._model = MegatronModel(
            config.model.path,
            getattr(torch, config.model.dtype),
            device,
            trainer.optimizer,
            layout=trainer.layout,
            recompute=trainer.recompute,
            replay=config.routing.replay != "off",
            overlap_grad_reduce=trainer.overlap_grad_reduce,
        )
        self._offload = Offload(self._model, saver)
        self._weights = WeightExport(
            self._export,
            self._rank,
            device,
            check=self._check_exported,
            # Well under the engines' own limit: a deaf one is left out before the others give up.
            group_timeout_s=config.weights.timeout_s / 4,
        )
        if trainer.loss.kl.coefficient:
            self._model.keep_reference()
        self._saver = saver_of(config, self._model, self._layout)
        if checkpoint_dir is None:
            return TrainerState(step=0)
        state = loading.resume(Path(checkpoint_dir), self._model, self._layout, config.model.dtype)
        self._steps = state.step
        return state

    @property
    def _layout(self) -> dict[str, int | None]:
        """What a checkpoint is written by; any other can read it."""
        return {"num_ranks": self._world_size, **msgspec.to_builtins(self._config.trainer.layout)}

    # -- training

    def train_step(self, batch_path: str, step: int) -> StepResult:
        """Consume the `TrainBatch` frame at a path; see `train_on`."""
        with raise_on_all_ranks(doing=f"cannot read the batch {batch_path}"):
            batch = read_frame(batch_path, TrainBatch)
        return self.train_on(batch, step)

    def train_on(self, batch: TrainBatch, step: int) -> StepResult:
        """Take the optimizer steps of one batch.

        Args:
            batch: The same on every rank.
            step: The number of this step, from 1; reported back.

        Returns:
            The same on every rank.

        Raises:
            AlignmentError: When routing rows do not fit; nothing was changed.
            NonFiniteLoss: When one update more than `trainer.max_skipped_updates` in a row had a loss or a
                gradient norm that is not finite, or a spike; the last one changed nothing.
        """
        begin = time.perf_counter()
        trainer = self._config.trainer
        wanted = targets(batch)
        parts = split_updates(batch.group_index, trainer.updates_per_batch)
        placed = [self._place(batch, wanted, part) for part in parts]
        old = reference = None
        if trainer.loss.old_log_probs == "recompute":
            old = np.zeros(batch.num_tokens, np.float32)
            for i, part in enumerate(placed):
                found, placed[i] = self._old_log_probs(part, batch.num_tokens)
                old += found
        if trainer.loss.kl.coefficient:
            reference = sum(
                (self._reference_log_probs(part, batch.num_tokens) for part in placed),
                np.zeros(batch.num_tokens, np.float32),
            )
        goal = UpdateInputs(wanted, self._advantages(batch, wanted, old, reference), old, reference)

        learning_rate = linear_warmup(self._steps, trainer.optimizer.lr, trainer.optimizer.warmup_steps)
        sums, trained, norms, skipped = torch.zeros(len(SUMS), dtype=torch.float64), 0, list[float](), 0
        start = old if old is not None else np.zeros(batch.num_tokens, np.float32)
        probe: dict[str, float] = {}
        for epoch in range(trainer.epochs_per_batch):
            for trajectories, part in zip(parts, placed, strict=True):
                sums_here, log_probs, tokens = self._forward_backward(part, trajectories, goal)
                if old is None and not epoch:
                    start = start + log_probs
                found = self.model.sum_over_ranks(sums_here).cpu()
                if not epoch and part is placed[0]:
                    probe = self._probe_routing(part, wanted, self._from_all_ranks(start), step)
                norm = self._update(float(found[0]), learning_rate, step, batch)
                if norm is None:
                    skipped += 1
                else:
                    sums, trained = sums + found, trained + tokens
                    norms.append(norm)
        self._steps += 1
        start = self._from_all_ranks(start)
        metrics = means(sums.tolist(), max(trained, 1), bypass=old is None, reference=reference is not None)
        importance = trainer.loss.importance
        cap = None if importance.level == "off" else importance.high
        return StepResult(
            step=step,
            metrics=metrics
            | logprob_mismatch.measure(wanted, start, cap)
            | probe
            | _routing_counts(batch)
            | {
                "grad_norm": float(np.mean(norms)) if norms else math.nan,
                "learning_rate": learning_rate,
                "updates": float(len(norms)),
                "updates_skipped": float(skipped),
                "tokens": float(batch.num_tokens),
                "trained_tokens": float(wanted.mask.sum()),
                "step_s": time.perf_counter() - begin,
            },
            extremes=logprob_mismatch.extremes(batch, wanted, start),
        )

    def _update(self, loss: float, learning_rate: float, step: int, batch: TrainBatch) -> float | None:
        """Take one optimizer step with the gradients of the last pass.

        Returns:
            Their norm, or None when the step was skipped because something is not finite or the norm a spike.

        Raises:
            NonFiniteLoss: When too many were skipped in a row.
        """
        trainer = self._config.trainer
        norm, problem = math.nan, None
        if not math.isfinite(loss):
            problem = f"the loss of step {step} (batch {batch.batch_id}) is {loss}, expected a finite number"
        else:
            limit = trainer.optimizer.skip_grad_norm_above
            norm = self.model.step(learning_rate, skip_above=limit)
            if not math.isfinite(norm):
                problem = (
                    f"the gradient norm of step {step} (batch {batch.batch_id}) is {norm}, expected a finite "
                    "number"
                )
            elif limit is not None and norm > limit:
                problem = (
                    f"the gradient norm of step {step} (batch {batch.batch_id}) is {norm:.4g}, above "
                    f"trainer.optimizer.skip_grad_norm_above = {limit}"
                )
        if problem is None:
            self._skipped = 0
            return norm
        self._skipped += 1
        if self._skipped > trainer.max_skipped_updates:
            raise NonFiniteLoss(
                f"{problem}; the weights were left as they are, for the {self._skipped}. time in a row "
                f"(trainer.max_skipped_updates is {trainer.max_skipped_updates}). Lower "
                "trainer.optimizer.lr, or look for non-finite log-probs in it"
            )
        log.warning("%s; the update is skipped", problem)
        return None

    def _advantages(
        self, batch: TrainBatch, wanted: Targets, old: Float32Array | None, reference: Float32Array | None
    ) -> Float32Array:
        """Of the rewards as the config shapes them, by token, `[S]`."""
        config = self._config
        loss = config.trainer.loss
        rewards = batch.rewards
        if loss.overlong_buffer_tokens is not None:
            lengths, longest = (
                longest_answers(batch.weight_versions, batch.offsets),
                config.rollout.max_new_tokens,
            )
            rewards = rewards + overlong_penalty(lengths, longest, loss.overlong_buffer_tokens)
        if reference is not None and loss.kl.where == "reward":
            policy = wanted.rollout_log_probs if old is None else self._from_all_ranks(old)
            distances = kl_estimate(
                loss.kl.estimator,
                torch.from_numpy(policy),
                torch.from_numpy(self._from_all_ranks(reference)),
            ).numpy()
            away = np.bincount(
                wanted.trajectory[wanted.mask], distances[wanted.mask], minlength=batch.num_trajectories
            )
            rewards = (rewards - loss.kl.coefficient * away).astype(np.float32)
        return estimate_advantages(loss.advantages, rewards, batch.group_index)[wanted.trajectory]

    def _place(self, batch: TrainBatch, wanted: Targets, trajectories: Sequence[int]) -> list[_Placed]:
        """Cut a part of the batch, check this rank's routing rows, bring its micro-batches to the device."""
        model = self.model
        lengths = np.diff(batch.offsets)[list(trajectories)].tolist()
        plan = [
            MicroBatch(tuple(trajectories[j] for j in micro_batch.trajectories))
            for micro_batch in plan_micro_batches(
                lengths,
                self._config.trainer.micro_batch_tokens,
                ranks=model.data_parallel_size,
                align=model.alignment,
                multiple=model.micro_batch_multiple,
                cost=model.cost,
            )[model.data_parallel_rank]
        ]
        rows, valid = None, None
        if self._config.routing.replay == "r3":
            rows, valid = batch.routed_experts, batch.routing_valid
            mine = [j for micro_batch in plan for j in micro_batch.trajectories]
            with raise_on_all_ranks():
                check_rows(batch, model.config, mine)
        packings = [pack(micro_batch, batch.offsets, model.alignment) for micro_batch in plan]
        placed = []
        for packing in level(packings) if model.level_lengths else packings:
            inputs, source = model.place(packing, batch.token_ids, rows, valid)
            trained = np.flatnonzero((source >= 0) & wanted.mask[source])
            tokens = source[trained]
            placed.append(
                _Placed(
                    inputs=inputs,
                    logits_of=torch.from_numpy(trained).to(model.device),
                    tokens=tokens,
                    labels=torch.from_numpy(wanted.labels[tokens].astype(np.int64)).to(model.device),
                )
            )
        return placed

    def _log_probs(self, micro_batch: _Placed, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs of the trained tokens under the sampling temperature, and entropies, `[n]` each."""
        return vocab_parallel_log_probs(
            logits.index_select(0, micro_batch.logits_of),
            micro_batch.labels,
            self._config.rollout.temperature,
            self.model.tensor_group,
        )

    def _old_log_probs(self, placed: list[_Placed], num_tokens: int) -> tuple[Float32Array, list[_Placed]]:
        """The trainer's log-probs at the start of the updates, `[S]`; this rank's tokens only.

        The micro-batches and the replayed rows are those of the update itself: with one optimizer step a
        batch, any difference to the update's own log-probs is an error somewhere, and `ppo_kl` shows it.

        Returns:
            The log-probs, and the micro-batches for the update: under R2 with the routing of this pass.
        """
        inputs = [p.inputs for p in placed]
        if self._config.routing.replay != "r2":
            parts = self.model.run(inputs, self._keep_log_probs(placed), forward_only=True)
            return _spread(placed, parts, num_tokens), placed
        parts, recorded = self.model.record(inputs, self._keep_log_probs(placed))
        old = _spread(placed, parts, num_tokens)
        return old, [replace(p, inputs=routed) for p, routed in zip(placed, recorded, strict=True)]

    def _reference_log_probs(self, placed: list[_Placed], num_tokens: int) -> Float32Array:
        """Those of the reference policy, routed by itself, `[S]`; this rank's tokens only."""
        inputs = [p.inputs._replace(routing=None) for p in placed]
        with self.model.as_reference():
            parts = self.model.run(inputs, self._keep_log_probs(placed), forward_only=True)
        return _spread(placed, parts, num_tokens)

    def _keep_log_probs(self, placed: list[_Placed]) -> LossFunction[torch.Tensor]:
        """What a pass without gradients is for."""

        def keep(index: int, logits: torch.Tensor) -> tuple[torch.Tensor, int, torch.Tensor]:
            log_probs, _ = self._log_probs(placed[index], logits)
            return log_probs.sum(), 0, log_probs

        return keep

    def _from_all_ranks(self, values: Float32Array) -> Float32Array:
        """Per-token values `[S]` of which each rank has those of its own tokens, and 0 elsewhere."""
        own = torch.from_numpy(values).to(self.model.device, copy=True)  # what is summed is overwritten
        summed = self.model.sum_over_ranks(own)
        gathered: Float32Array = summed.cpu().numpy()
        return gathered

    def _probe_routing(
        self, placed: list[_Placed], wanted: Targets, start: Float32Array, step: int
    ) -> dict[str, float]:
        """Route one micro-batch a rank by the trainer itself, every `routing.probe_every` steps.

        They take turns: the first ones hold the longest trajectories.
        """
        routing, count = self._config.routing, self.model.micro_batch_multiple
        if routing.replay != "r3" or not routing.probe_every or step % routing.probe_every:
            return {}
        first = step // routing.probe_every * count
        sample = [placed[(first + i) % len(placed)] for i in range(count)]
        inputs = [p.inputs._replace(routing=None) for p in sample]
        parts = self.model.run(inputs, self._keep_log_probs(sample), forward_only=True)
        probed = _spread(sample, [torch.ones_like(part) for part in parts], len(start))
        native = self._from_all_ranks(_spread(sample, parts, len(start)))
        return logprob_mismatch.measure_routing(wanted, start, native, self._from_all_ranks(probed) > 0)

    def _forward_backward(
        self, placed: list[_Placed], trajectories: Sequence[int], goal: UpdateInputs
    ) -> tuple[torch.Tensor, Float32Array, int]:
        """Accumulate the gradients of one update.

        Returns:
            This rank's sums, in the order of `SUMS`; its log-probs before the update, `[S]`; and the trained
            tokens of the update, on all ranks.
        """
        loss_config, wanted = self._config.trainer.loss, goal.wanted
        part = wanted.mask & np.isin(wanted.trajectory, trajectories)
        lengths = np.bincount(wanted.trajectory[part], minlength=int(wanted.trajectory.max(initial=0)) + 1)
        trained = int(part.sum())
        counts = np.zeros(len(wanted.mask), np.float32)
        counts[part] = trained * token_weights(
            loss_config.aggregate, wanted.trajectory[part], lengths, self._config.rollout.max_new_tokens
        )

        def policy_loss(
            index: int, logits: torch.Tensor
        ) -> tuple[torch.Tensor, int, tuple[torch.Tensor, torch.Tensor]]:
            micro_batch = placed[index]
            log_probs, entropy = self._log_probs(micro_batch, logits)

            def values(of: np.ndarray) -> torch.Tensor:
                return torch.from_numpy(of[micro_batch.tokens]).to(log_probs.device)

            rollout = values(wanted.rollout_log_probs)
            tokens = TrainedTokens(
                proximal=rollout if goal.old is None else values(goal.old),
                rollout=rollout,
                advantages=values(goal.advantages),
                counts=values(counts),
                sequences=Sequences(
                    values(wanted.trajectory),
                    torch.from_numpy(lengths).to(log_probs.device),
                    self.model.sum_over_context,
                ),
                reference=None if goal.reference is None else values(goal.reference),
            )
            summed, sums = policy_sums(loss_config, log_probs, entropy, tokens)
            return summed, len(micro_batch.tokens), (sums, log_probs.detach())

        parts = self.model.run([p.inputs for p in placed], policy_loss)
        empty = torch.zeros(len(SUMS), dtype=torch.float64, device=self.model.device)
        total = sum((sums for sums, _ in parts), empty)
        start = _spread(placed, [log_probs for _, log_probs in parts], len(wanted.mask))
        return total, start, trained

    # -- weights

    def take_snapshot(self, weight_version: int) -> None:
        """Copy the current weights; see `TrainerRank.take_snapshot`."""
        if self._snapshot is None:
            self._snapshot = WeightSnapshot(keeps=self._rank == 0, where=self._config.weights.snapshot)
        self._snapshot.take(self.model.bridge.export_hf(self.model.chunks))

    def publish(self, directory: str, weight_version: int) -> None:
        """Write the weights as a Hugging Face folder, atomically."""
        self.weights.specs()
        if self._snapshot is None:
            self.model.bridge.save_hf(self.model.chunks, directory)
        else:
            with beside_training(self.model.device):
                self.model.bridge.write_hf(self._snapshot.tensors(), directory)

    def publish_delta(self, path: str, base: int | None, weight_version: int) -> bool:
        """Write what has changed since `base`; see `TrainerRank.publish_delta`."""
        self.weights.specs()
        with self._beside_training():
            return self.weights.write_delta(Path(path), base, weight_version)

    def open_weight_group(self, invite: GroupInvite) -> None:
        """Rank 0 joins a weight-update group; the others return at once."""
        self.weights.open_group(invite)

    def close_weight_group(self, group_name: str) -> None:
        """Leave it; a group that is not open is left alone."""
        self.weights.close_group(group_name)

    def plan_buckets(self, bucket_bytes: int) -> tuple[tuple[TensorSpec, ...], ...]:
        """What `send_weights` will broadcast, in its order."""
        buckets = self.weights.plan(bucket_bytes)
        if self._config.weights.transport == "tensor":
            self.weights.make_room(buckets)  # now, rather than in the first update
        return buckets

    def send_weights(self, group_names: list[str], bucket_bytes: int) -> None:
        """Broadcast the current weights, bucket by bucket, into each of the groups."""
        with self._beside_training():
            self.weights.send(group_names, bucket_bytes)

    def share_bucket(self, number: int, bucket_bytes: int, copies: int) -> list[bytes]:
        """Put one bucket where processes of rank 0's host can read it; see `TrainerRank.share_bucket`."""
        with self._beside_training():
            return self.weights.share(number, bucket_bytes, copies)

    def _beside_training(self) -> AbstractContextManager[None]:
        """Around what is done with the copy: the thread that trains may be busy with the next step."""
        return nullcontext() if self._snapshot is None else beside_training(self.model.device)

    def checksums(self) -> dict[str, str]:
        """Sums over the weights as an engine makes them; see `TrainerRank.checksums`."""
        return self.weights.checksums()

    def _check_exported(self, specs: Sequence[TensorSpec]) -> None:
        model = self._config.model
        check_exported(specs, served_specs(Path(model.path)), self.model.bridge.hf_config, model.dtype)

    def _export(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self._snapshot is not None:
            return self._snapshot.tensors()
        return self.model.bridge.export_hf(self.model.chunks)

    # -- devices that engines share

    def offload(self) -> None:
        """Move the model, its optimizer and what else a step needs of the one before to the host."""
        assert self._offload is not None, "setup comes first"
        self._offload.offload()

    def reload(self) -> None:
        """Bring it back, as it was."""
        assert self._offload is not None, "setup comes first"
        self._offload.reload()

    # -- the end

    def save_checkpoint(self, directory: str, extra: dict[str, Any]) -> None:
        """Copy the state, and write `step_<N>` of it in the background; see `Saver`."""
        assert self._saver is not None, "setup comes first"
        self._saver.save(Path(directory), self._steps, extra)

    def saved_checkpoint(self, wait: bool) -> Saved:
        """What became of the last one; `wait` until it stands or has failed."""
        assert self._saver is not None, "setup comes first"
        return self._saver.saved(wait=wait)

    def close(self) -> None:
        """Let what is being written end, and leave all process groups."""
        if self._saver is not None:
            self._saver.close()
            self._saver = None  # it holds the model
        if self._weights is not None:
            self._weights.close()
        if self._model is not None:
            self._model.close()
            self._model = self._offload = None
        stop_process_groups()


def linear_warmup(step: int, peak: float, warmup_steps: int) -> float:
    """Returns the learning rate of step `step` (from 0): it rises linearly to `peak`, then stays there.

    It is a function of the step alone, so that a resumed run needs no scheduler state.
    """
    return peak * min(1.0, (step + 1) / warmup_steps) if warmup_steps else peak


def _spread(placed: Sequence[_Placed], parts: Sequence[torch.Tensor], num_tokens: int) -> Float32Array:
    """Values of micro-batches' trained tokens at their places in the batch, `[S]`; 0 elsewhere.

    Args:
        placed: The micro-batches.
        parts: `[n]` of each; none on a pipeline stage before the last.
        num_tokens: S.
    """
    spread = np.zeros(num_tokens, np.float32)
    for micro_batch, values in zip(placed, parts, strict=False):
        spread[micro_batch.tokens] = values.cpu().numpy()
    return spread


def _routing_counts(batch: TrainBatch) -> dict[str, float]:
    """Rows the batch should carry (one less than tokens, a trajectory), and how many of them it lacks."""
    if batch.routing_valid is None:
        return {"routing_rows": 0.0, "routing_rows_invalid": 0.0}
    rows = int(np.maximum(np.diff(batch.offsets) - 1, 0).sum())
    return {
        "routing_rows": float(rows),
        "routing_rows_invalid": float(rows - int(np.count_nonzero(batch.routing_valid))),
    }
