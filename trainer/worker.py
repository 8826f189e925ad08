"""One rank of the trainer: `TrainerWorker` turns batches of trajectories into new weights.

```
train_step(batch) ─ check routing rows ─ plan updates and micro-batches
    ─► [log-probs of the proximal and the reference policy, values: forward only, where needed] ─► advantages
    ─► for each update: forward and backward over micro-batches, with routing replay
                         ─► finite, and no spike? ─► optimizer step, or the update is skipped and counted
                         ─► [the same for the critic, if there is one]
    ─► metrics, summed over ranks
```

The weight of a token depends only on the trajectories of the update (`objectives.token_weights`). The loss
therefore does not depend on how trajectories are split into micro-batches and distributed over ranks.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from async_rl.config import Config, ImportanceConfig, RejectConfig, old_log_probs_reason, parse_config
from async_rl.engine_protocol import GroupInvite, WeightBucket
from async_rl.engines.model_facts import read_config
from async_rl.errors import CorruptFrame, InvariantError, NonFiniteLoss, TrainerError
from async_rl.store.frames import find_flaws, read_trajectories
from async_rl.store.kept_batches import keep_frames, keep_result
from async_rl.trainer_protocol import (
    Extreme,
    LagMeasurement,
    Saved,
    SendReport,
    StepResult,
    TrainerState,
)
from async_rl.types import BoolArray, Float32Array, Int64Array, TakenBatch, TrainBatch
from trainer import logprob_mismatch
from trainer.checkpoints import loading
from trainer.checkpoints.saving import CheckpointSaver
from trainer.collectives import raise_on_all_ranks
from trainer.critic import Critic, ValueTargets
from trainer.lag_sums import TokenSums, deal_groups
from trainer.losses.advantages import (
    Estimator,
    estimate_advantages,
    has_batch_baseline,
    lacks_baseline,
    load_estimator,
    overlong_penalty,
)
from trainer.losses.corrections import rejected_answers
from trainer.losses.gae import explained_variance, gae, token_rewards
from trainer.losses.kl import kl_estimate, sums_to_go, teacher_advantages
from trainer.losses.log_probs import KeptTokens
from trainer.losses.objectives import load_objective, token_weights
from trainer.losses.policy_loss import NO_UPDATES, SUMS, TrainedTokens, UpdateSums, mean_metrics, policy_sums
from trainer.losses.sequences import Sequences
from trainer.losses.trial import try_loss
from trainer.losses.turns import (
    find_turns,
    has_trained_tokens,
    longest_turns,
    turn_of_tokens,
    turn_returns,
)
from trainer.megatron.cpu import has_transformer_engine
from trainer.megatron.gradient_parts import GradientPart, copy_gradients, inner_products
from trainer.megatron.model import LossFunction, MegatronModel
from trainer.megatron.offload import TrainerOffload, memory_saver
from trainer.megatron.packing import (
    MicroBatch,
    Targets,
    level_packings,
    make_targets,
    pack_micro_batch,
    plan_micro_batches,
    shift_left,
    split_updates,
)
from trainer.megatron.process_groups import choose_device, start_process_groups, stop_process_groups
from trainer.megatron.replay import check_rows
from trainer.megatron.weight_owners import WeightOwners
from trainer.passthrough import check_megatron_settings
from trainer.placed import PlacedMicroBatch, spread_values
from trainer.validate import check_adapters, check_fused_layers
from trainer.weights.adapter_export import export_adapter, write_adapter
from trainer.weights.checksums import sum_tensors
from trainer.weights.snapshot import WeightSnapshot, side_stream
from trainer.weights.weight_export import WeightExport
from trainer.weights.weight_manifest import check_exported, served_specs

log = logging.getLogger(__name__)

MAX_SKIPPED_UPDATES: Final = 3
"""Updates that may be skipped in a row; one more is an error: a policy that can no longer be trained."""

_LARGEST_DIFFERENCE = 1e-2
"""Nats, above what rounding in bfloat16 explains, between two passes of equal weights and routing rows."""


@dataclass(frozen=True)
class UpdateInputs:
    """Per-token inputs of a batch's updates, `[S]` each, at the predicting positions."""

    targets: Targets
    advantages: Float32Array
    attempt: Int64Array
    """Which attempt each token belongs to."""
    left_out: Float32Array
    """1 for tokens of trajectories that add nothing to the loss."""
    old_log_probs: Float32Array | None
    """Log-probs of the proximal policy, for this rank's tokens only. None: the engine's under `old_log_probs:
    rollout`, else those of the update's own forward pass."""
    reference_log_probs: Float32Array | None
    teacher_log_probs: Float32Array | None
    value_targets: ValueTargets | None = None
    """None: there is no critic."""
    groups_without_baseline: int = 0
    """Groups of which no attempt can be compared with another one."""
    only: BoolArray | None = None
    """The tokens whose loss counts, `[S]`; the weights of tokens are those of the whole update. None: all."""


@dataclass
class TakenUpdates:
    """What the updates of a batch have given."""

    start: Float32Array
    """Log-probs before the updates, `[S]`, for this rank's tokens only."""
    learning_rate: float
    """0 while only the critic is trained."""
    sums: UpdateSums = NO_UPDATES
    """Of all updates that were not skipped."""
    later: UpdateSums = NO_UPDATES
    """Of those that another one preceded."""
    norms: list[float] = field(default_factory=list)
    skipped: int = 0
    of_critic: list[dict[str, float]] = field(default_factory=list)
    """The metrics of each update of the critic."""
    probe: dict[str, float] = field(default_factory=dict)
    difference: float = math.nan
    """Mean absolute difference of the first update's log-probs from those of a pass before it, nats."""


class TrainerWorker:
    """Implements a rank of `async_rl.trainer_protocol.Trainer` on Megatron-Core."""

    def __init__(self, config: dict[str, Any], rank: int, world_size: int, init_address: str) -> None:
        """Parse the run config, given as plain values; `setup` builds the model."""
        self.config: Config = parse_config(config)
        self._rank, self._world_size, self._init_address = rank, world_size, init_address
        self.num_steps = 0
        self._skipped = {"policy": 0, "critic": 0}
        """Consecutive skipped updates."""
        self._model: MegatronModel | None = None
        self.critic: Critic | None = None
        self._snapshot: WeightSnapshot | None = None
        self._saver: CheckpointSaver | None = None
        self._offload: TrainerOffload | None = None
        self._read: tuple[TakenBatch, TrainBatch] | None = None
        """What `read_batch` has read, with this node's paths of its frames."""
        self._weights: WeightExport | None = None

    @property
    def model(self) -> MegatronModel:
        """The model, available once `setup` has built it."""
        assert self._model is not None, "setup comes first"
        return self._model

    @property
    def _estimator(self) -> Estimator:
        """The advantage estimator of the config."""
        return load_estimator(self.config.trainer.loss)

    @property
    def weights(self) -> WeightExport:
        """The export of weights to engines, available once `setup` has built it."""
        assert self._weights is not None, "setup comes first"
        return self._weights

    @property
    def saver(self) -> CheckpointSaver:
        """The writer of checkpoints, available once `setup` has built it."""
        assert self._saver is not None, "setup comes first"
        return self._saver

    def setup(self, checkpoint_dir: str | None) -> TrainerState:
        """Join the other ranks, build the model and load the newest checkpoint of a folder, if there is
        one.

        Args:
            checkpoint_dir: A folder of checkpoints, which may be empty or missing, or a single checkpoint;
                None starts from the weights in `model.path`.

        Raises:
            ConfigError: When model, layout, loss and routing replay are incompatible.
            EnvironmentNotReady: When the ranks cannot connect to each other.
            CheckpointError: When the checkpoint cannot be loaded.
        """
        config, trainer = self.config, self.config.trainer
        try_loss(config)  # this node may lack the user's module
        device = choose_device(trainer.device, self._rank, bind_numa=True)
        if trainer.lora is not None:
            check_adapters(config, read_config(config.model.path))
        check_megatron_settings(config, on_gpu=device.type == "cuda")
        if device.type == "cuda":
            check_fused_layers(config, None if has_transformer_engine() else "is not installed")
        saver = memory_saver() if config.placement.shared and device.type == "cuda" else None
        start_process_groups(
            self._rank,
            self._world_size,
            self._init_address,
            trainer.layout,
            timeout_s=max(trainer.start_timeout_s, trainer.step_timeout_s),
            seed=config.run.seed,
        )
        self._model = MegatronModel(config, device)
        models = [self._model]
        if trainer.loss.advantages == "gae":
            self.critic = Critic(config, device)
            models.append(self.critic.model)
        self._offload = TrainerOffload(*models, saver=saver)
        self._weights = WeightExport(
            self.export_weights,
            self.export_sent,
            self.export_owned,
            self._rank,
            device,
            owners=self._checked_owners,
            # Well under the engines' own limit: an engine that does not respond is left out before the others
            # time out.
            group_timeout_s=config.weights.timeout_s / 4,
            shares_device=config.placement.shared and device.type == "cuda",
        )
        if trainer.loss.kl.coefficient:
            self._model.keep_reference()
        critic = None if self.critic is None else self.critic.model
        self._saver = CheckpointSaver(config, self._model, self._layout, critic)
        if checkpoint_dir is None:
            return TrainerState(step=0)
        state = loading.load_newest(
            Path(checkpoint_dir), self._model, self._layout, config.model.dtype, critic
        )
        self.num_steps = state.step
        return state

    @property
    def _layout(self) -> dict[str, int | None]:
        """The layout that a checkpoint's manifest records; a checkpoint can be loaded under any layout."""
        return {"num_ranks": self._world_size, **msgspec.to_builtins(self.config.trainer.layout)}

    # -- training

    def read_batch(self, batch: TakenBatch) -> dict[str, str]:
        """Implements `Trainer.read_batch`.

        Raises:
            AlignmentError: When routing rows are of another model than the batch's.
            TrainerError: When a frame was damaged while it was read.
        """
        self._read = None
        own = self.needed_trajectories(batch)
        try:
            self._read = batch, read_trajectories(batch, own)
        except CorruptFrame as error:
            if flaws := find_flaws(batch.trajectories[index] for index in own):
                return flaws
            raise TrainerError(f"rank {self._rank} cannot read {batch.batch_id}: {error}") from error
        return {}

    def train_step(self, batch: TakenBatch, step: int) -> StepResult:
        """Train on the batch that was read (`train_on`).

        Of other ranks' tokens this rank has versions and masks, from the references, and their rollout
        log-probs, which the mismatch is measured with.

        Raises:
            InvariantError: When `read_batch` has not read this batch.
        """
        read, self._read = self._read, None
        if read is None or read[0].trajectory_ids != batch.trajectory_ids:
            raise InvariantError(f"rank {self._rank} has not read {batch.batch_id}")
        stored, tokens = read
        own = self.needed_trajectories(batch)
        if batch.kept_in is not None and self.model.leads_data_parallel_rank:
            with _logging_failed_writes():
                keep_frames(stored, Path(batch.kept_in), own, self._rank)
        result = self.train_on(self._share_rollout_log_probs(tokens), step)
        metrics = dict(result.metrics)
        if batch.num_experts:
            present = batch.routing_rows - batch.routing_rows_invalid
            metrics["routing_rows_invalid"] = float(batch.num_fed_tokens - present)
        extremes = self._with_token_ids(result.extremes, batch, own)
        result = msgspec.structs.replace(result, metrics=metrics, extremes=extremes)
        if batch.kept_in is not None and self._rank == 0:
            with _logging_failed_writes():
                keep_result(Path(batch.kept_in), result)
        return result

    def _share_rollout_log_probs(self, own: TrainBatch) -> TrainBatch:
        """Return a batch that has the rollout log-probs of all ranks' trajectories."""
        rollout = torch.from_numpy(own.rollout_log_probs).to(self.model.device)
        shared = self.model.sum_over_data_parallel(rollout).cpu().numpy()
        return msgspec.structs.replace(own, rollout_log_probs=shared)

    def needed_trajectories(self, batch: TakenBatch) -> tuple[int, ...]:
        """Return the indices of the trajectories whose frames this rank reads in `read_batch`."""
        updates = self.config.trainer.updates_per_batch
        return self._own_trajectories(batch, split_updates(np.array(batch.group_index, np.int32), updates))

    def _own_trajectories(self, batch: TakenBatch, parts: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """Return the trajectories in this rank's micro-batches when a batch is trained in parts."""
        plans = [self._plan_micro_batches(np.array(batch.lengths), part) for part in parts]
        return tuple(sorted({index for plan in plans for micro_batch in plan for index in micro_batch}))

    def _with_token_ids(
        self, extremes: tuple[Extreme, ...], batch: TakenBatch, own: Sequence[int]
    ) -> tuple[Extreme, ...]:
        """Complete token ids, which only the rank has that reads the trajectory."""
        mine = {batch.trajectory_ids[index] for index in own}
        ids = torch.tensor(
            [e.token_id if e.trajectory_id in mine else 0 for e in extremes], dtype=torch.int64
        )
        found = self.model.sum_over_data_parallel(ids.to(self.model.device)).tolist()
        return tuple(msgspec.structs.replace(e, token_id=i) for e, i in zip(extremes, found, strict=True))

    def train_on(self, batch: TrainBatch, step: int) -> StepResult:
        """Take the optimizer steps of one batch.

        Args:
            batch: The batch; token ids and routing rows may be 0 where other ranks train the trajectory.
            step: The number of this step, from 1; reported back.

        Returns:
            Metrics and the tokens with the largest mismatch, the same on every rank.

        Raises:
            AlignmentError: When routing rows are of another model; no weight was changed.
            NonFiniteLoss: When more than `MAX_SKIPPED_UPDATES` updates in a row had a loss or
                gradient norm that is not finite, or a norm above the limit; the last update changed no
                weight.
        """
        begin = time.perf_counter()
        loss = self.config.trainer.loss
        wanted = make_targets(batch)
        parts = split_updates(batch.group_index, self.config.trainer.updates_per_batch)
        placed = [self.place_micro_batches(batch, wanted, part) for part in parts]
        goal = self._prepare_updates(batch, wanted, placed, step)
        taken = self._take_updates(batch, parts, placed, goal, step)
        self.num_steps += 1
        start = self._sum_over_ranks(taken.start)
        metrics = mean_metrics(
            taken.sums,
            taken.later,
            bypass=loss.old_log_probs == "rollout",
            reference=goal.reference_log_probs is not None,
            teacher=goal.teacher_log_probs is not None,
        )
        cap = None if loss.importance.level == "off" else loss.importance.high
        return StepResult(
            step=step,
            metrics=metrics
            | logprob_mismatch.measure_mismatch(wanted, start, cap)
            | taken.probe
            | _critic_metrics(taken.of_critic, goal.value_targets, wanted.mask)
            | _routing_counts(batch)
            | {
                "old_log_prob_abs_diff": taken.difference,
                "grad_norm": float(np.mean(taken.norms)) if taken.norms else math.nan,
                "learning_rate": taken.learning_rate,
                "updates": float(len(taken.norms)),
                "updates_skipped": float(taken.skipped),
                "groups_without_baseline": float(goal.groups_without_baseline),
                "tokens": float(batch.num_tokens),
                "trained_tokens": float(wanted.mask.sum()),
                "step_s": time.perf_counter() - begin,
            },
            extremes=logprob_mismatch.largest_differences(batch, wanted, start),
        )

    def _prepare_updates(
        self, batch: TrainBatch, wanted: Targets, placed: list[list[PlacedMicroBatch]], step: int
    ) -> UpdateInputs:
        """Compute what a batch's updates need, by forward passes where necessary.

        Under R2 it replaces the micro-batches in `placed` by those that hold the routing of its pass.
        """
        loss, num_tokens = self.config.trainer.loss, batch.num_tokens
        old = reference = values = None
        checks = loss.check_old_log_probs_every > 0 and step % loss.check_old_log_probs_every == 0
        if loss.old_log_probs != "rollout" and (old_log_probs_reason(self.config) or checks):
            old = np.zeros(num_tokens, np.float32)
            for number, part in enumerate(placed):
                found, placed[number] = self.compute_old_log_probs(part, num_tokens)
                old += found
        if loss.kl.coefficient:
            reference = np.zeros(num_tokens, np.float32)
            for part in placed:
                reference += self._compute_reference_log_probs(part, num_tokens)
        rejected = self._rejected_answers(batch, wanted, old)
        teacher = self._teacher_log_probs(batch)
        alone = np.zeros_like(rejected)
        if teacher is None and not has_batch_baseline(self._estimator):
            alone = lacks_baseline(batch.group_index, batch.attempt_index, ~rejected)
        if self.critic is not None:
            values = self._compute_values(self.critic, batch, placed, step)
        advantages, targets = self._token_advantages(batch, wanted, old, reference, values, ~rejected)
        if teacher is not None:
            policy = wanted.rollout_log_probs if old is None else old
            advantages = teacher_advantages(loss.teacher, advantages, policy, teacher)
        return UpdateInputs(
            targets=wanted,
            advantages=advantages,
            attempt=batch.attempt_index.astype(np.int64)[wanted.trajectory],
            left_out=(rejected | alone).astype(np.float32)[wanted.trajectory],
            groups_without_baseline=len(np.unique(batch.group_index[alone])),
            old_log_probs=old,
            reference_log_probs=reference,
            teacher_log_probs=teacher,
            value_targets=targets,
        )

    def _take_updates(
        self,
        batch: TrainBatch,
        parts: Sequence[Sequence[int]],
        placed: Sequence[list[PlacedMicroBatch]],
        goal: UpdateInputs,
        step: int,
    ) -> TakenUpdates:
        """Take the optimizer steps of a batch: one for each part and epoch, of the critic too."""
        trainer, old = self.config.trainer, goal.old_log_probs
        policy_step = self.num_steps - trainer.critic.warmup_steps
        trains_policy, rate = policy_step >= 0, 0.0
        if trains_policy:
            rate = linear_warmup(policy_step, trainer.optimizer.lr, trainer.optimizer.warmup_steps)
        taken = TakenUpdates(np.zeros(batch.num_tokens, np.float32) if old is None else old, rate)
        for epoch in range(trainer.epochs_per_batch):
            for number, (trajectories, part) in enumerate(zip(parts, placed, strict=True)):
                own, log_probs, tokens = self.accumulate_gradients(
                    part, trajectories, goal, forward_only=not trains_policy
                )
                found = self.model.sum_over_ranks(own).cpu()
                if not epoch and old is None:
                    taken.start = taken.start + log_probs
                if not epoch and not number:
                    if old is not None:
                        taken.difference = self._mean_difference(part, tokens, old, log_probs)
                    taken.probe = self.probe_routing(part, goal.targets, taken.start, step)
                if goal.value_targets is not None:
                    taken.of_critic.append(self._update_critic(part, trajectories, goal, step, batch))
                if trains_policy:
                    norm = self._take_optimizer_step(float(found[0]), rate, step, batch)
                    if norm is None:
                        taken.skipped += 1
                        continue
                    if taken.norms:
                        taken.later = taken.later.add(found, tokens)
                    taken.norms.append(norm)
                taken.sums = taken.sums.add(found, tokens)
        return taken

    def _compute_values(
        self, critic: Critic, batch: TrainBatch, placed: Sequence[list[PlacedMicroBatch]], step: int
    ) -> Float32Array:
        """Compute the critic's values before the updates, `[S]`, on all ranks.

        Raises:
            NonFiniteLoss: When one is not finite.
        """
        own = np.zeros(batch.num_tokens, np.float32)
        for part in placed:
            own += critic.compute_values(part, batch.num_tokens)
        values = self._sum_over_ranks(own)
        if not np.isfinite(values).all():
            raise NonFiniteLoss(
                f"the critic's values at step {step} (batch {batch.batch_id}) are not finite: lower "
                "trainer.critic.lr, and resume from an earlier checkpoint"
            )
        return values

    def _mean_difference(
        self, placed: list[PlacedMicroBatch], trained: int, old: Float32Array, current: Float32Array
    ) -> float:
        """Return the mean absolute difference of old and current log-probs over an update's tokens, nats.

        Args:
            placed: This rank's micro-batches of the batch's first update.
            trained: The number of its trained tokens, on all ranks.
            old: `[S]`, from the pass before the update.
            current: `[S]`, from the update's own forward pass.
        """
        apart = np.abs(old - current)
        own = sum(float(apart[p.token_indices].sum(dtype=np.float64)) for p in placed)
        total = self.model.sum_over_ranks(torch.tensor([own], dtype=torch.float64, device=self.model.device))
        if (mean := float(total[0]) / max(trained, 1)) > _LARGEST_DIFFERENCE:
            log.warning(
                "the pass that computes old log-probs differs from the update's own by %.3g nats on average: "
                "with equal weights and routing rows it should repeat it",
                mean,
            )
        return mean

    def _update_critic(
        self,
        placed: list[PlacedMicroBatch],
        trajectories: Sequence[int],
        goal: UpdateInputs,
        step: int,
        batch: TrainBatch,
    ) -> dict[str, float]:
        """Take one optimizer step of the critic.

        Returns:
            Its metrics; the gradient norm is NaN if the update was skipped.
        """
        critic = self.critic
        assert critic is not None
        assert goal.value_targets is not None
        weights, trained = self._token_weights(trajectories, goal)
        sums = critic.accumulate_gradients(placed, weights * (1 - goal.left_out), goal.value_targets)
        loss, clipped = self.model.sum_over_ranks(sums).tolist()
        norm = self._take_optimizer_step(loss, critic.settings.lr, step, batch, of_critic=True)
        return {
            "value_loss": loss / max(trained, 1),
            "value_clip_fraction": clipped / max(trained, 1),
            "critic_grad_norm": math.nan if norm is None else norm,
        }

    def _take_optimizer_step(
        self, loss: float, learning_rate: float, step: int, batch: TrainBatch, *, of_critic: bool = False
    ) -> float | None:
        """Take one optimizer step with the gradients of the last backward pass.

        Returns:
            The norm of the gradients, or None when the step was skipped because the loss or the norm is not
            finite, or the policy's norm is above `skip_grad_norm_above`.

        Raises:
            NonFiniteLoss: When too many steps in a row were skipped.
        """
        trainer = self.config.trainer
        norm, problem = math.nan, None
        name, whose, model, limit = "policy", "", self.model, trainer.optimizer.skip_grad_norm_above
        setting = "trainer.optimizer.lr"
        if of_critic and self.critic is not None:
            name, whose, model, limit = "critic", "critic's ", self.critic.model, None
            setting = "trainer.critic.lr"
        if not math.isfinite(loss):
            problem = (
                f"the {whose}loss of step {step} (batch {batch.batch_id}) is {loss}, expected a finite number"
            )
        else:
            norm = model.take_optimizer_step(learning_rate, skip_above=limit)
            if not math.isfinite(norm):
                problem = (
                    f"the {whose}gradient norm of step {step} (batch {batch.batch_id}) is {norm}, expected a "
                    "finite number"
                )
            elif limit is not None and norm > limit:
                problem = (
                    f"the gradient norm of step {step} (batch {batch.batch_id}) is {norm:.4g}, above "
                    f"trainer.optimizer.skip_grad_norm_above = {limit}"
                )
        if problem is None:
            self._skipped[name] = 0
            return norm
        self._skipped[name] += 1
        if self._skipped[name] > MAX_SKIPPED_UPDATES:
            raise NonFiniteLoss(
                f"{problem}; the weights were left unchanged, consecutive skipped updates: "
                f"{self._skipped[name]} (at most {MAX_SKIPPED_UPDATES} are allowed). "
                f"Lower {setting}, or look for non-finite log-probs in the batch"
            )
        log.warning("%s; the update is skipped", problem)
        return None

    def _rejected_answers(self, batch: TrainBatch, wanted: Targets, old: Float32Array | None) -> BoolArray:
        """Return which trajectories `trainer.loss.reject` leaves out, `[N]`."""
        reject = self.config.trainer.loss.reject
        if old is None or reject == RejectConfig():  # all ratios are 1, or no condition is set
            return np.zeros(batch.num_trajectories, np.bool_)
        index = torch.from_numpy(wanted.trajectory[wanted.mask])
        sequences = Sequences(index, torch.bincount(index, minlength=batch.num_trajectories))
        policy = torch.from_numpy(self._sum_over_ranks(old)[wanted.mask])
        rollout = torch.from_numpy(wanted.rollout_log_probs[wanted.mask])
        rejected: BoolArray = rejected_answers(reject, policy, rollout, sequences).numpy()
        return rejected

    def _token_advantages(
        self,
        batch: TrainBatch,
        wanted: Targets,
        old: Float32Array | None,
        reference: Float32Array | None,
        values_now: Float32Array | None,
        counted: BoolArray,
    ) -> tuple[Float32Array, ValueTargets | None]:
        """Return the advantage of each token, `[S]`, from the rewards with the config's penalties; and what
        the critic is trained towards, if there is one.
        """
        config = self.config
        loss = config.trainer.loss
        rewards = batch.rewards
        if loss.overlong_buffer_tokens is not None:
            turns = find_turns(batch.weight_versions, batch.offsets)
            lengths, longest = longest_turns(turns, batch.num_trajectories), config.rollout.max_new_tokens
            rewards = rewards + overlong_penalty(lengths, longest, loss.overlong_buffer_tokens)
        charges = None
        if reference is not None and loss.kl.where == "reward":
            charges = self._kl_charges(wanted, old, reference)
            if not has_batch_baseline(self._estimator):
                charged = np.bincount(wanted.trajectory, charges, minlength=batch.num_trajectories)
                rewards, charges = (rewards - charged).astype(np.float32), None

        # A token has the advantage of what is compared: its trajectory, its turn, or its own return.
        targets = None
        unit, of, values, weights = wanted.trajectory, np.arange(batch.num_trajectories), rewards, counted
        if loss.turn_discount is not None:
            turns = find_turns(batch.weight_versions, batch.offsets)
            unit = shift_left(turn_of_tokens(turns, batch.num_tokens), batch.offsets[1:] - 1)
            of = turns.trajectory
            values = turn_returns(
                turns, rewards, batch.turn_reward_positions, batch.turn_reward_values, loss.turn_discount
            )
            weights = counted[of] & has_trained_tokens(turns, batch.loss_mask)
        if charges is not None or values_now is not None:
            tokens = np.flatnonzero(wanted.mask)
            units = unit[tokens]
            if values_now is None:
                of, values = of[units], values[units] - sums_to_go(charges, wanted.trajectory)[tokens]
            else:
                of = units
                values, targets = self._estimate_by_critic(batch, wanted, rewards, charges, values_now)
            weights = weights[units] / np.bincount(units)[units]
            unit = np.full(batch.num_tokens, -1)
            unit[tokens] = np.arange(len(tokens))
        found = estimate_advantages(
            self._estimator, values, batch.group_index[of], batch.attempt_index[of], weights
        )
        return np.append(found, np.float32(0))[unit], targets

    def _estimate_by_critic(
        self,
        batch: TrainBatch,
        wanted: Targets,
        rewards: Float32Array,
        charges: np.ndarray | None,
        values: Float32Array,
    ) -> tuple[np.ndarray, ValueTargets]:
        """Return the GAE of each trained token, `[n]`, and the targets of the critic."""
        critic, tokens = self.config.trainer.critic, np.flatnonzero(wanted.mask)
        of_tokens = token_rewards(
            rewards,
            batch.turn_reward_positions,
            batch.turn_reward_values,
            wanted.mask,
            wanted.trajectory,
        )
        if charges is not None:
            of_tokens -= charges
        advantages, found = gae(
            of_tokens[tokens],
            values[tokens].astype(np.float64),
            wanted.trajectory[tokens],
            critic.gamma,
            critic.gae_lambda,
        )
        returns = np.zeros(batch.num_tokens, np.float32)
        returns[tokens] = found
        return advantages, ValueTargets(values, returns)

    def _teacher_log_probs(self, batch: TrainBatch) -> Float32Array | None:
        """Return the teacher's log-probs at the predicting positions, `[S]`; None without a teacher.

        They are NaN in trajectories that were sampled before the run had a teacher.
        """
        if self.config.trainer.loss.teacher.model is None:
            return None
        if batch.teacher_log_probs is None:
            return np.full(batch.num_tokens, np.nan, np.float32)
        return shift_left(batch.teacher_log_probs, batch.offsets[1:] - 1)

    def _kl_charges(self, wanted: Targets, old: Float32Array | None, reference: Float32Array) -> np.ndarray:
        """Return the KL penalty of each trained token, `[S]` float64; 0 for others."""
        kl = self.config.trainer.loss.kl
        policy = torch.from_numpy(wanted.rollout_log_probs if old is None else self._sum_over_ranks(old))
        distances = kl_estimate(kl.estimator, policy, torch.from_numpy(self._sum_over_ranks(reference)))
        return np.where(wanted.mask, kl.coefficient * distances.numpy().astype(np.float64), 0.0)

    def place_micro_batches(
        self, batch: TrainBatch, wanted: Targets, trajectories: Sequence[int]
    ) -> list[PlacedMicroBatch]:
        """Plan the micro-batches of some trajectories, and copy their tokens and routing rows to the device.

        Args:
            batch: The batch.
            wanted: The batch's targets.
            trajectories: Indices of the trajectories of one update.
        """
        model = self.model
        plan = self._plan_micro_batches(np.diff(batch.offsets), trajectories)
        rows, valid = None, None
        if self.config.routing.replay == "r3":
            rows, valid = batch.routed_experts, batch.routing_valid
            check_rows(batch, model.config)
        packings = [pack_micro_batch(micro_batch, batch.offsets, model.alignment) for micro_batch in plan]
        placed = []
        for packing in level_packings(packings) if model.level_lengths else packings:
            inputs, source = model.place_inputs(packing, batch.token_ids, rows, valid)
            trained = np.flatnonzero((source >= 0) & wanted.mask[source])
            tokens, mask = source[trained], batch.sampling_mask
            placed.append(
                PlacedMicroBatch(
                    inputs=inputs,
                    rows=torch.from_numpy(trained).to(model.device),
                    token_indices=tokens,
                    labels=torch.from_numpy(wanted.labels[tokens].astype(np.int64)).to(model.device),
                    # The mask is at the sampled token, which the position before it predicts.
                    kept=None if mask is None else KeptTokens.of(mask.take(tokens + 1), model.device),
                    scale=self._scale_of(batch, tokens + 1),
                )
            )
        return placed

    def _scale_of(self, batch: TrainBatch, tokens: np.ndarray) -> torch.Tensor | None:
        """Return the run's temperature over that of each token, `[n]` float32, or None if all are 1.

        They differ for tokens that were sampled before the run was resumed with another temperature.
        """
        if batch.temperatures is None:
            return None
        temperature = np.float32(self.config.rollout.temperature)
        sampled_at = batch.temperatures[tokens]
        scale = np.where(np.isnan(sampled_at), np.float32(1), temperature / sampled_at)
        return None if (scale == 1).all() else torch.from_numpy(scale).to(self.model.device)

    def _plan_micro_batches(self, lengths: np.ndarray, trajectories: Sequence[int]) -> list[MicroBatch]:
        """Return this rank's micro-batches of one update; all ranks plan alike, from the lengths, `[N]`."""
        model = self.model
        plan = plan_micro_batches(
            lengths[list(trajectories)].tolist(),
            self.config.trainer.micro_batch_tokens,
            ranks=model.data_parallel_size,
            align=model.alignment,
            multiple=model.micro_batch_multiple,
            cost=model.cost,
        )[model.data_parallel_rank]
        return [tuple(trajectories[j] for j in micro_batch) for micro_batch in plan]

    def log_probs_and_entropy(
        self, micro_batch: PlacedMicroBatch, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probs of trained tokens under the distribution that was sampled, and entropies, `[n]`
        each.
        """
        trained, temperature = hidden.index_select(0, micro_batch.rows), self.config.rollout.temperature
        if micro_batch.scale is not None:
            # Logits are linear in the hidden state, so this divides those of a row by its own temperature.
            trained = trained * micro_batch.scale[:, None].to(trained.dtype)
        return self.model.log_probs(trained, micro_batch.labels, temperature, micro_batch.kept)

    def compute_old_log_probs(
        self, placed: list[PlacedMicroBatch], num_tokens: int
    ) -> tuple[Float32Array, list[PlacedMicroBatch]]:
        """Compute the trainer's log-probs before the updates, `[S]`, for this rank's tokens only.

        It uses the micro-batches and replayed rows of the update itself: any difference from the log-probs of
        the first update is an error, which the metric `old_log_prob_abs_diff` shows.

        Returns:
            The log-probs, and the micro-batches for the update; under R2 they hold the routing of this pass.
        """
        inputs = [p.inputs for p in placed]
        if self.config.routing.replay != "r2":
            parts = self.model.run_schedule(inputs, self._log_probs_only(placed), forward_only=True)
            return spread_values(placed, parts, num_tokens), placed
        parts, recorded = self.model.record_routing(inputs, self._log_probs_only(placed))
        old = spread_values(placed, parts, num_tokens)
        return old, [replace(p, inputs=routed) for p, routed in zip(placed, recorded, strict=True)]

    def _compute_reference_log_probs(self, placed: list[PlacedMicroBatch], num_tokens: int) -> Float32Array:
        """Compute log-probs of the reference policy, routed natively, `[S]`, for this rank's tokens only."""
        inputs = [p.inputs._replace(routing=None) for p in placed]
        with self.model.as_reference():
            parts = self.model.run_schedule(inputs, self._log_probs_only(placed), forward_only=True)
        return spread_values(placed, parts, num_tokens)

    def _log_probs_only(self, placed: list[PlacedMicroBatch]) -> LossFunction[torch.Tensor]:
        """Return the loss function of a forward-only pass, whose results are the log-probs."""

        def keep(index: int, hidden: torch.Tensor) -> tuple[torch.Tensor, int, torch.Tensor]:
            log_probs, _ = self.log_probs_and_entropy(placed[index], hidden)
            return log_probs.sum(), 0, log_probs

        return keep

    def _sum_over_ranks(self, values: Float32Array) -> Float32Array:
        """Sum `[S]` values over ranks; each rank has values for its own tokens, and 0 elsewhere."""
        own = torch.from_numpy(values).to(self.model.device, copy=True)  # the sum overwrites its input
        summed = self.model.sum_over_ranks(own)
        gathered: Float32Array = summed.cpu().numpy()
        return gathered

    def probe_routing(
        self, placed: list[PlacedMicroBatch], wanted: Targets, start: Float32Array, step: int
    ) -> dict[str, float]:
        """Measure one micro-batch per rank with the trainer's own routing, every `routing.probe_every`
        steps.

        Successive probes take successive micro-batches, because the first ones hold the longest trajectories.

        Args:
            placed: This rank's micro-batches.
            wanted: The batch's targets.
            start: `[S]`, log-probs before the update, for this rank's tokens only.
            step: The number of the step.
        """
        routing, count = self.config.routing, self.model.micro_batch_multiple
        if routing.replay != "r3" or not routing.probe_every or step % routing.probe_every:
            return {}
        first = step // routing.probe_every * count
        sample = [placed[(first + i) % len(placed)] for i in range(count)]
        inputs = [p.inputs._replace(routing=None) for p in sample]
        parts = self.model.run_schedule(inputs, self._log_probs_only(sample), forward_only=True)
        probed = spread_values(sample, [torch.ones_like(part) for part in parts], len(start))
        native = self._sum_over_ranks(spread_values(sample, parts, len(start)))
        return logprob_mismatch.measure_routing(
            wanted, self._sum_over_ranks(start), native, self._sum_over_ranks(probed) > 0
        )

    def _token_weights(self, trajectories: Sequence[int], goal: UpdateInputs) -> tuple[Float32Array, int]:
        """Return the weight of each token in the loss of an update, times its number of trained tokens,
        `[S]`; and that number, over all ranks.
        """
        part = goal.targets.mask & np.isin(goal.targets.trajectory, trajectories)
        trained = int(part.sum())
        weights = np.zeros(len(part), np.float32)
        weights[part] = trained * token_weights(
            self.config.trainer.loss.aggregate, goal.attempt[part], self.config.rollout.max_new_tokens
        )
        return weights if goal.only is None else weights * goal.only, trained

    def accumulate_gradients(
        self,
        placed: list[PlacedMicroBatch],
        trajectories: Sequence[int],
        goal: UpdateInputs,
        *,
        forward_only: bool = False,
    ) -> tuple[torch.Tensor, Float32Array, int]:
        """Accumulate the gradients of one update; with `forward_only` it only measures.

        Returns:
            This rank's sums, in the order of `SUMS`; its log-probs before the update, `[S]`; and the number
            of trained tokens of the update over all ranks.
        """
        loss_config, wanted = self.config.trainer.loss, goal.targets
        part = wanted.mask & np.isin(wanted.trajectory, trajectories)
        lengths = np.bincount(wanted.trajectory[part], minlength=int(wanted.trajectory.max(initial=0)) + 1)
        counts, trained = self._token_weights(trajectories, goal)
        objective = load_objective(loss_config)

        def policy_loss(
            index: int, hidden: torch.Tensor
        ) -> tuple[torch.Tensor, int, tuple[torch.Tensor, torch.Tensor]]:
            micro_batch = placed[index]
            log_probs, entropy = self.log_probs_and_entropy(micro_batch, hidden)

            def values(of: np.ndarray) -> torch.Tensor:
                return torch.from_numpy(of[micro_batch.token_indices]).to(log_probs.device)

            rollout = values(wanted.rollout_log_probs)
            old = None if goal.old_log_probs is None else values(goal.old_log_probs)
            tokens = TrainedTokens(
                old_log_probs=rollout if loss_config.old_log_probs == "rollout" else old,
                rollout_log_probs=rollout,
                advantages=values(goal.advantages),
                rejected=values(goal.left_out),
                weights=values(counts),
                sequences=Sequences(
                    values(wanted.trajectory),
                    torch.from_numpy(lengths).to(log_probs.device),
                    self.model.sum_over_context,
                ),
                reference_log_probs=None
                if goal.reference_log_probs is None
                else values(goal.reference_log_probs),
                teacher_log_probs=None if goal.teacher_log_probs is None else values(goal.teacher_log_probs),
            )
            summed, sums = policy_sums(loss_config, objective, log_probs, entropy, tokens)
            return summed, len(micro_batch.token_indices), (sums, log_probs.detach())

        inputs = [p.inputs for p in placed]
        parts = self.model.run_schedule(inputs, policy_loss, forward_only=forward_only)
        empty = torch.zeros(len(SUMS), dtype=torch.float64, device=self.model.device)
        total = sum((sums for sums, _ in parts), empty)
        start = spread_values(placed, [log_probs for _, log_probs in parts], len(wanted.mask))
        return total, start, trained

    # -- the price of staleness

    def measure_lags(self, batch: TakenBatch) -> LagMeasurement:
        """Implements `Trainer.measure_lags`."""
        own = self._own_trajectories(batch, deal_groups(np.array(batch.group_index, np.int32)))
        with raise_on_all_ranks(doing=f"cannot read {batch.batch_id}"):
            tokens = read_trajectories(batch, own)
        return self.measure_lags_of(self._share_rollout_log_probs(tokens))

    def measure_lags_of(self, batch: TrainBatch) -> LagMeasurement:
        """Measure what a batch's tokens of each lag are worth to one update of all of its groups.

        Args:
            batch: As for `train_on`; each rank has the trajectories of its micro-batches of `deal_groups`.
        """
        model, wanted = self.model, make_targets(batch)
        parts = deal_groups(batch.group_index)
        placed = [self.place_micro_batches(batch, wanted, part) for part in parts]
        goal = self._prepare_updates(batch, wanted, placed, self.num_steps + 1)
        start = goal.old_log_probs
        if start is None:
            start = np.zeros(batch.num_tokens, np.float32)
            for part in placed:
                start += self.compute_old_log_probs(part, batch.num_tokens)[0]
        of_tokens = TokenSums(wanted, self._sum_over_ranks(start), parts)
        fresh: list[list[GradientPart]] = []
        lags = []
        for lag in of_tokens.lags:
            of_lag = replace(goal, only=wanted.lag == lag)

            def gradients(of_lag: UpdateInputs = of_lag) -> list[list[GradientPart]]:
                jobs = zip(placed, parts, strict=True)
                return [self._copy_gradient(part, trajectories, of_lag) for part, trajectories in jobs]

            found = gradients()
            with self._exact_correction():
                exact = gradients()
            fresh = fresh or found
            products = {
                "with_fresh": (found, fresh),
                "with_itself": (found, found),
                "with_exact": (found, exact),
                "exact_with_itself": (exact, exact),
            }
            lags.append(
                of_tokens.figures(
                    lag, **{name: inner_products(*pair, model.device) for name, pair in products.items()}
                )
            )
        return LagMeasurement(lags=tuple(lags), unknown_tokens=of_tokens.unknown)

    @contextmanager
    def _exact_correction(self) -> Iterator[None]:
        """Weight each token by its exact importance within the block, whatever the config says."""
        kept, loss = self.config, self.config.trainer.loss
        exact = ImportanceConfig(level="token", high=math.inf)
        loss = msgspec.structs.replace(loss, old_log_probs="recompute", importance=exact)
        trainer = msgspec.structs.replace(kept.trainer, loss=loss)
        self.config = msgspec.structs.replace(kept, trainer=trainer)
        try:
            yield
        finally:
            self.config = kept

    def _copy_gradient(
        self, placed: list[PlacedMicroBatch], trajectories: Sequence[int], goal: UpdateInputs
    ) -> list[GradientPart]:
        """Copy this rank's part of the gradient of some trajectories in an update of the whole batch."""
        everything = range(int(goal.targets.trajectory.max(initial=-1)) + 1)
        _, _, trained = self.accumulate_gradients(placed, everything, goal)
        own = int((goal.targets.mask & np.isin(goal.targets.trajectory, trajectories)).sum())
        # The schedule has divided by the trained tokens of these trajectories.
        return copy_gradients(self.model, own / max(trained, 1))

    # -- weights

    def take_snapshot(self, weight_version: int) -> None:
        """Implements `Trainer.take_snapshot`."""
        if self._snapshot is None:
            self._snapshot = WeightSnapshot(keeps=self._rank == 0, where=self.config.weights.snapshot)
        self._snapshot.copy_tensors(self._gather_weights())

    @property
    def syncs_adapter(self) -> bool:
        """Whether engines receive adapters, and keep their weights."""
        lora = self.config.trainer.lora
        return lora is not None and lora.sync == "adapter"

    def publish(self, directory: str, weight_version: int) -> None:
        """Write the weights as a Hugging Face folder, or the adapter as a folder of PEFT, atomically."""
        if self.syncs_adapter:
            self._publish_adapter(directory)
            return
        self.weights.owners()
        if self._snapshot is None:
            self.model.bridge.save_hf(self.model.chunks, directory)
        else:
            with side_stream(self.model.device):
                self.model.bridge.write_hf(self._snapshot.tensors(), directory)

    def _publish_adapter(self, directory: str) -> None:
        lora, base = self.config.trainer.lora, self.config.model.path
        assert lora is not None
        tensors = self.export_weights()
        if self._snapshot is not None:
            write_adapter(tensors, directory, lora, base)
            return
        with raise_on_all_ranks(doing=f"cannot write {directory}"):
            try:
                if self._rank == 0:
                    write_adapter(tensors, directory, lora, base)
            finally:
                deque(tensors, maxlen=0)  # gathering is collective: all ranks iterate to the end

    def publish_delta(self, path: str, base: int | None, weight_version: int) -> bool:
        """Implements `Trainer.publish_delta`."""
        self.weights.owners()
        with self._beside_training():
            num_files = dist.get_world_size() if self._snapshot is None else 1
            return self.weights.write_delta(Path(path), base, weight_version, num_files)

    def open_weight_group(self, invite: GroupInvite) -> None:
        """Join a weight-update group on its sender; the other ranks return at once."""
        self.weights.open_group(invite)

    def close_weight_group(self, group_name: str) -> None:
        """Leave the weight-update group of this sender; do nothing when it is not open."""
        self.weights.close_group(group_name)

    def plan_buckets(self, bucket_bytes: int) -> tuple[WeightBucket, ...]:
        """Return the buckets of all senders in the order in which engines take them."""
        buckets = self.weights.plan_buckets(bucket_bytes)
        if self.config.weights.transport == "tensor" and not self.weights.shares_device:
            # Before the first update needs the memory.
            self.weights.allocate_buffers([each.tensors for each in buckets])
        return buckets

    def abort_weight_group(self, group_name: str) -> None:
        """Implements `Trainer.abort_weight_group`; it is called in a thread of its own."""
        self.weights.abort_group(group_name)

    def send_weights(self, group_names: list[str], bucket_bytes: int) -> SendReport:
        """Broadcast what this sender has of the current weights, bucket by bucket, to each of its groups."""
        with self._beside_training():
            return self.weights.send_weights(group_names, bucket_bytes)

    def share_bucket(self, number: int, bucket_bytes: int, ranks: list[int]) -> list[bytes]:
        """Implements `Trainer.share_bucket`."""
        with self._beside_training():
            return self.weights.share_bucket(number, bucket_bytes, ranks)

    def _beside_training(self) -> AbstractContextManager[None]:
        """Return a context for work on the snapshot, which may run beside the next training step."""
        return nullcontext() if self._snapshot is None else side_stream(self.model.device)

    def checksums(self) -> dict[str, str]:
        """Implements `Trainer.checksums`; those of adapters only tell which tensors have changed."""
        if self.syncs_adapter:
            return sum_tensors(self.export_weights())
        return self.weights.checksums()

    def _checked_owners(self) -> WeightOwners:
        """Return what engines receive, and from whom; rank 0 compares it with their model."""
        bridge, model = self.model.bridge, self.config.model
        owners = bridge.owners(self.model.chunks)
        if self._rank == 0:
            check_exported(owners.specs, served_specs(Path(model.path)), bridge.hf_config, model.dtype)
        return owners

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what engines receive, the snapshot or the current state: weights under Hugging Face names,
        with adapters merged into them, or adapters under PEFT's names.
        """
        return self._gather_weights() if self._snapshot is None else self._snapshot.tensors()

    def export_sent(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield those of the weights that this rank's sender sends, or the snapshot, which rank 0 has."""
        if self._snapshot is not None:
            return self._snapshot.tensors()
        return self.model.bridge.export_sent(self.model.chunks)

    def export_owned(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield those of the weights that this rank owns, or the snapshot, which rank 0 has."""
        if self._snapshot is not None:
            return self._snapshot.tensors()
        return self.model.bridge.export_owned(self.model.chunks)

    def _gather_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.syncs_adapter:
            return export_adapter(self.model.chunks, self.model.bridge)
        return self.model.bridge.export_hf(self.model.chunks)

    # -- time-sharing of devices with engines

    def offload(self, keep_weights: bool = False) -> None:
        """Move model, optimizer state and everything else that the next step needs to the host.

        Args:
            keep_weights: Whether the model stays on the device.
        """
        assert self._offload is not None, "setup comes first"
        if not keep_weights:
            self.weights.release_device()
        self._offload.offload_state(keep_weights=keep_weights)

    def reload(self) -> None:
        """Move the state back to the device, unchanged."""
        assert self._offload is not None, "setup comes first"
        self._offload.reload_state()

    # -- checkpoints and shutdown

    def save_checkpoint(self, directory: str, extra: dict[str, Any]) -> None:
        """Copy the state and write it to `step_<N>` in the background (`CheckpointSaver`)."""
        self.saver.start_save(Path(directory), self.num_steps, extra)

    def saved_checkpoint(self, wait: bool) -> Saved:
        """Return the state of the last save; with `wait`, after it has been completed or has failed."""
        return self.saver.poll_saved(wait=wait)

    def close(self) -> None:
        """Wait for a checkpoint that is being written, and leave all process groups."""
        if self._saver is not None:
            self._saver.close()
            self._saver = None  # it holds the model
        if self._weights is not None:
            self._weights.close()
        if self._model is not None:
            self._model.close()
            self._model = self._offload = None
        if self.critic is not None:
            self.critic.model.close()
            self.critic = None
        stop_process_groups()


@contextmanager
def _logging_failed_writes() -> Iterator[None]:
    """Log that a batch cannot be kept: the step continues, only its repetition is not possible."""
    try:
        yield
    except OSError as error:
        log.warning("the batch cannot be kept for async-rl replay-step: %s", error)


def linear_warmup(step: int, peak: float, warmup_steps: int) -> float:
    """Return the learning rate of step `step` (from 0): it rises linearly to `peak`, then stays there.

    It is a function of the step alone, so that a resumed run needs no scheduler state.
    """
    return peak * min(1.0, (step + 1) / warmup_steps) if warmup_steps else peak


def _critic_metrics(
    updates: Sequence[dict[str, float]], targets: ValueTargets | None, mask: BoolArray
) -> dict[str, float]:
    """Return the means over a critic's updates, and how much of the returns its values explained before
    them; nothing without a critic.
    """
    if targets is None:
        return {}
    old_values, returns = (each[mask].astype(np.float64) for each in targets)
    means = {name: float(np.mean([update[name] for update in updates])) for name in updates[0]}
    return means | {"value_explained_variance": explained_variance(old_values, returns)}


def _routing_counts(batch: TrainBatch) -> dict[str, float]:
    """Return how many rows the batch needs (a trajectory one less than tokens), and how many are missing."""
    if batch.routing_valid is None:
        return {"routing_rows": 0.0, "routing_rows_invalid": 0.0}
    rows = int(np.maximum(np.diff(batch.offsets) - 1, 0).sum())
    return {
        "routing_rows": float(rows),
        "routing_rows_invalid": float(rows - int(np.count_nonzero(batch.routing_valid))),
    }
