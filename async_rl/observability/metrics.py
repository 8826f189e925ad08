"""Every Prometheus instrument of a run, declared here and nowhere else.

An attribute `x` of `Metrics` is the metric `async_rl_x`. Names end in their unit; counters end in `_total`.
Each class below is a section of `docs/reference/metrics.md`, which is generated from it (`make docs`).
"""

from __future__ import annotations

import math

from async_rl.observability.evaluation_record import EVERYTHING, EvaluationRecord
from async_rl.observability.instruments import Instruments, counter, gauge, histogram
from async_rl.observability.records import StepRecord

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)
"""Waits of a loop wake-up up to a large trainer step."""
TOKENS = tuple(float(1 << n) for n in range(4, 18))
"""16 to 131072."""
SHARES = (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""None at all, then from one in a thousand to all."""
VERSIONS = tuple(float(n) for n in range(17))

_STEP = "run, after each step, from the trainer"
_BATCH = "run, after each step, from its batch"
_PROBE = "trainer.worker, in every step that routing.probe_every names"
_PULSE = "run.live_status, once a second"


class PolicyMetrics(Instruments):
    """The policy, as of the last trainer step."""

    reward = gauge(
        "Mean reward of the last batch.",
        source=_BATCH,
        bad="Flat from the start: all siblings of a group get the same reward, so there is no advantage. "
        "Easier tasks, more siblings.",
    )
    loss = gauge(
        "Policy loss of the last step.",
        source=_STEP,
        bad="Its size says little; one that is not finite ends the run.",
    )
    ppo_kl = gauge(
        "Mean of old minus current log-probs over the last step.",
        unit="nats",
        source=_STEP,
        bad="Grows step by step: lower `trainer.optimizer.lr`. Spikes: look at `grad_norm` and at the parts "
        "of the rollout KL. With one optimizer step a batch it is 0; if not, the update sees other routing "
        "than the pass before it.",
    )
    ppo_kl_bypass = gauge(
        "The same where the engines' log-probs stand for the old ones.",
        unit="nats",
        source=_STEP,
        bad="Engine mismatch and staleness are in it too: look at `kl_mismatch_nats` and "
        "`kl_staleness_nats` to tell them apart.",
    )
    clip_fraction = gauge(
        "Share of tokens whose ratio the last step clipped.",
        unit="share",
        source=_STEP,
        bad="Above 0.2: the policy moves too far in a step, or data is too old.",
    )
    entropy_nats = gauge(
        "Mean entropy of the policy at the trained tokens.",
        unit="nats",
        source=_STEP,
        bad="Falls to 0: collapse. Raise `rollout.temperature`, lower the learning rate.",
    )
    grad_norm = gauge(
        "Gradient norm of the last step, before clipping.",
        source=_STEP,
        bad="Not finite: the run ends with `NonFiniteLoss`. Spikes: look at `log_prob_diff_extreme_nats`.",
    )
    learning_rate = gauge(
        "Learning rate of the last step.",
        source=_STEP,
        bad="Not what the config says after `trainer.optimizer.warmup_steps` steps.",
    )


class EvaluationMetrics(Instruments):
    """Validation sets, as of the last evaluation."""

    evaluation_reward = gauge(
        "Mean reward over the tasks of a validation set.",
        "set",
        source="run, after each evaluation",
        bad="Falls while the training reward rises: the policy fits its training tasks, or games their "
        "reward.",
    )
    evaluation_pass_share = gauge(
        "Estimated pass@k of a validation set.",
        "set",
        "k",
        unit="share",
        source="run, after each evaluation",
        bad="pass@1 rises and pass@k of a large k falls: the policy narrows. Raise the entropy bonus, or the "
        "KL penalty.",
    )
    evaluation_weight_version = gauge(
        "Weight version of the last evaluation that came to its end.",
        source="run, after each evaluation",
        bad="Stays behind `trainer_weight_version` by more than `evaluation.every`: they fail, or take too "
        "long.",
    )
    evaluation_seconds = histogram(
        "Duration of an evaluation, from its first question on.",
        buckets=(*SECONDS, 1000, 2500, 5000),
        unit="seconds",
        source="run, after each evaluation",
        bad="Longer than `evaluation.every` versions take: fewer answers, or more `evaluation.engines`.",
    )
    evaluations_total = counter(
        "Evaluations by result (done, missing).",
        "result",
        source="run, after each evaluation",
        bad="`missing` rises: the log says why, as `evaluations.jsonl` does.",
    )
    evaluation_answers_total = counter(
        "Answers of evaluations by result (scored, or why one was dropped).",
        "result",
        source="run, after each evaluation",
        bad="`mixed_version` above 0: somebody else loads weights into the engines.",
    )


class AgreementMetrics(Instruments):
    """Trainer against engines: the parts of the rollout KL."""

    rollout_kl = gauge(
        "Mean of rollout minus the trainer's log-probs before the last step, by versions of lag (0, 1, 2+).",
        "lag",
        unit="nats",
        source=_STEP,
        bad="Away from 0 at lag 0: engine and trainer differ at equal weights. Grows with the lag: "
        "staleness; lower `rollout.max_staleness` or the learning rate.",
    )
    kl_mismatch_nats = gauge(
        "Engine mismatch: half the mean squared log-prob difference of tokens sampled at the trainer's "
        "version.",
        unit="nats",
        source=_STEP,
        bad="A jump: weights did not arrive as they were sent, or routing is replayed wrongly. Steadily "
        "above 1e-3: other kernels or types in the engine; compare `model.dtype`, look at `kl_routing_nats`.",
    )
    kl_staleness_nats = gauge(
        "Staleness: what tokens sampled by earlier versions have beyond the engine mismatch.",
        unit="nats",
        source=_STEP,
        bad="Above 0.01: data is too old for steps of this size; lower `rollout.max_staleness` or the "
        "learning rate.",
    )
    kl_routing_nats = gauge(
        "Routing: what replaying the engines' routing takes away from the mismatch, by a probe at lag 0.",
        unit="nats",
        source=_PROBE,
        bad="Negative: replay makes it worse, so the rows are not those that the engine used; see "
        "docs/design/routing-replay.md. Positive is what `routing.replay` is good for.",
    )
    routing_probe_abs_diff_nats = gauge(
        "Mean absolute trainer minus rollout log-prob of the probe's lag-0 tokens, by routing (native, "
        "replayed).",
        "routing",
        unit="nats",
        source=_PROBE,
        bad="`replayed` not below `native`: replay does not help, so the rows are not those of the calls.",
    )
    log_prob_diff_nats = gauge(
        "Mean of trainer minus rollout log-prob over all trained tokens.",
        unit="nats",
        source=_STEP,
        bad="A steady bias: sampling settings that the log-probs do not know of (`rollout.top_p` below 1).",
    )
    log_prob_abs_diff_nats = gauge(
        "Mean absolute trainer minus rollout log-prob over all trained tokens.",
        unit="nats",
        source=_STEP,
        bad="Far above `lag0_log_prob_abs_diff_nats`: staleness.",
    )
    lag0_log_prob_abs_diff_nats = gauge(
        "The same over tokens sampled at the trainer's own version: the engines' mismatch alone.",
        unit="nats",
        source=_STEP,
        bad="Above about 1e-5 in float32 or 1e-2 in bfloat16: as `kl_mismatch_nats`.",
    )
    log_prob_diff_extreme_nats = gauge(
        "Largest absolute trainer minus rollout log-prob of any trained token.",
        unit="nats",
        source=_STEP,
        bad="Jumps alone, with the means where they were: single broken tokens. `extremes` in "
        "`metrics.jsonl` names trajectory, position and lag.",
    )
    importance_ratio_mean = gauge(
        "Mean of exp(old - rollout) over the last batch, before truncation.",
        source=_STEP,
        bad="Far from 1: data is too old; lower `rollout.max_staleness`.",
    )
    importance_ratio = gauge(
        "Percentiles of exp(trainer - rollout log-prob) before the step, exact over all ranks "
        "(0.01, 0.5, 0.99, 0.999).",
        "quantile",
        source=_STEP,
        bad="The 0.99 near `trainer.loss.importance.high`: the bound bites on more than single tokens.",
    )
    importance_rejected_fraction = gauge(
        "Share of the trained tokens that is of answers left out by `trainer.loss.reject`.",
        unit="share",
        source=_STEP,
        bad="Above 0.1: answers are too far from the policy; lower `rollout.max_staleness`, or look at "
        "`kl_mismatch_nats`.",
    )
    reference_kl_nats = gauge(
        "Estimated KL divergence from the reference policy; NaN where there is none.",
        unit="nats",
        source=_STEP,
        bad="Grows without end: raise `trainer.loss.kl.coefficient`.",
    )
    updates_skipped_total = counter(
        "Updates left out because the loss or the gradient norm was not finite, or a spike.",
        source=_STEP,
        bad="Rises: lower `trainer.optimizer.lr`, and look at the extremes in metrics.jsonl.",
    )
    effective_sample_share = gauge(
        "Effective sample size of the truncated importance weights, over the trained tokens.",
        unit="share",
        source=_STEP,
        bad="Below 0.5: few tokens carry the gradient; lower `rollout.max_staleness`.",
    )


class FlowMetrics(Instruments):
    """Trajectories, from dispatch to settlement.

    At every moment dispatched = in flight + queued + trained + dropped.
    """

    trajectories_dispatched_total = counter(
        "Trajectories handed to an agent loop.",
        source="queue.trajectory_queue, at dispatch",
        bad="Does not rise: admission is closed, which `oldest_wait_seconds` explains.",
    )
    trajectories_in_flight = gauge(
        "Trajectories dispatched and not yet finished with their group.",
        source=_PULSE,
        bad="Far below `rollout.max_concurrent_trajectories`: the staleness bound holds work back, or the "
        "data has ended.",
    )
    trajectories_queued = gauge(
        "Trajectories of finished groups that wait for the trainer.",
        source=_PULSE,
        bad="At its bound all the time: the trainer is the bottleneck. Always 0: the engines are.",
    )
    trajectories_trained_total = counter(
        "Trajectories consumed by a trainer step.",
        source="queue.trajectory_queue, when a batch is settled",
        bad="Dispatched minus in flight, queued, trained and dropped is not 0 for longer than a scrape: a "
        "bug of ours; please report it.",
    )
    trajectories_dropped_total = counter(
        "Trajectories that will never be trained, by reason.",
        "reason",
        source="queue.trajectory_queue, when they are dropped",
        bad="Rises: work is lost; docs/design/staleness.md explains the reasons.",
    )
    queue_bytes = gauge(
        "Bytes of finished trajectories held in the spool.",
        unit="bytes",
        source=_PULSE,
        bad="Near `queue.max_bytes`: dispatch stops there; raise it or lower `rollout.max_staleness`.",
    )
    trajectory_tokens = histogram(
        "Tokens of finished trajectories, prompt and all turns.",
        buckets=TOKENS,
        unit="tokens",
        source=_BATCH,
        bad="Piles up at `rollout.max_context_tokens`: answers are cut.",
    )
    staleness_versions = histogram(
        "Trainer version minus oldest sampled version of each trained trajectory.",
        buckets=VERSIONS,
        unit="versions",
        source=_BATCH,
        bad="Never above `rollout.max_staleness`. Mostly at it: rollouts are too far ahead; fewer engines "
        "or a faster trainer.",
    )
    max_staleness_versions = gauge(
        "`rollout.max_staleness` of the run: the bound of the above.",
        unit="versions",
        source="run.orchestrator, when the run begins",
        bad="None: it is what the config says.",
    )
    length_ks = gauge(
        "Kolmogorov-Smirnov distance of trained trajectories' lengths from those of all that ended.",
        source=_BATCH,
        bad="Above 0.05: long (or short) answers are lost out of proportion; docs/design/staleness.md.",
    )
    masked_tokens_total = counter(
        "Sampled tokens of trained trajectories that were too old to be trained on.",
        unit="tokens",
        source=_BATCH,
        bad="A large share of `sampled_tokens_total`: raise `rollout.max_staleness`.",
    )
    stage_wait_seconds = histogram(
        "Waiting of one piece of work in one stage (admission, engine, queue).",
        "stage",
        buckets=SECONDS,
        unit="seconds",
        source="engines.pool and queue.trajectory_queue, when a wait ends",
        bad="The stage with the long waits is the one before the bottleneck.",
    )
    trajectory_retries_total = counter(
        "Attempts at trajectories after their first one failed.",
        source="rollout.manager, before a retry",
        bad="Rises: a loop, tool or reward fails; the log says which.",
    )
    task_retries_total = counter(
        "Times a task was given out again because its group was lost.",
        "reason",
        source="rollout.manager, when a task goes back",
        bad="Rises: as `trajectories_dropped_total`.",
    )
    reward_seconds = histogram(
        "Duration of one call of a reward, however it ended.",
        "reward",
        buckets=SECONDS,
        unit="seconds",
        source="rollout.rewards.reward_calls, after each call",
        bad="Close to its timeout: calls fail, and their trajectories with them, which hold slots meanwhile.",
    )
    reward_errors_total = counter(
        "Trajectories that a reward failed: it raised, took too long, or returned no finite number.",
        "reward",
        source="rollout.rewards.reward_calls, after the last retry",
        bad="Rises: the attempt is made again or dropped; the log says why.",
    )
    reward_retries_total = counter(
        "Calls of a reward that were made again after one that failed.",
        "reward",
        source="rollout.rewards.reward_calls, before a retry",
        bad="Rises: the server behind it is overloaded or gone.",
    )
    tool_calls_total = counter(
        "Tool calls by tool and status (ok, error); `unknown` is what the policy makes up.",
        "tool",
        "status",
        source="rollout, after each tool call",
        bad="`error` rises: tools that raise or time out; the model reads the error as text.",
    )
    tool_seconds = histogram(
        "Duration of a tool call, by tool.",
        "tool",
        buckets=SECONDS,
        unit="seconds",
        source="rollout, after each tool call",
        bad="Near `rollout.tool_timeout_s`: calls are cut; make the tool faster or raise the limit.",
    )
    tool_wait_seconds = histogram(
        "Wait of a tool call for others of the same tool to end, by tool.",
        "tool",
        buckets=SECONDS,
        unit="seconds",
        source="rollout, after each tool call",
        bad="As long as the calls themselves: raise the tool's `max_concurrent`, if it bears more.",
    )
    openai_requests_total = counter(
        "Requests of agents over OpenAI's API by result: answered, repeated (the earlier answer once more), "
        "another (a conversation begins), refused.",
        "result",
        source="rollout.session.conversation, when a request comes",
        bad="`repeated` rises: clients lose connections or are impatient. `another` rises with an agent that "
        "should have one conversation: it edits its history. `refused`: the agent's log says why.",
    )
    openai_ignored_total = counter(
        "Parameters of such requests that were not heeded, because they would change what is sampled.",
        "parameter",
        source="rollout.session.conversation, when a request comes",
        bad="Not bad by itself: set `rollout.temperature` and the like if the agent's values are wanted.",
    )
    sampled_tokens_total = counter(
        "Tokens sampled by engines.",
        unit="tokens",
        source="rollout, after each engine call",
        bad="Does not rise while trajectories are in flight: see `seconds_since_progress`.",
    )
    trained_tokens_total = counter(
        "Tokens the policy wrote that were trained on.",
        unit="tokens",
        source=_STEP,
        bad="Far below `sampled_tokens_total` at the end of a run: work is dropped or masked.",
    )
    tokens_per_second = gauge(
        "Tokens sampled per second over the last step.",
        unit="tokens per second",
        source=_BATCH,
        bad="Falls: engines are down, idle, or answers have become long.",
    )


class PartialMetrics(Instruments):
    """Partial rollouts and what a restart takes over."""

    interruptions_total = counter(
        "Engine calls cut short by a weight update.",
        source="rollout, when a call ends so",
        bad="None is lost. Many a trajectory: updates are frequent against the length of answers.",
    )
    resumes_total = counter(
        "Engine calls that continued an interrupted turn.",
        source="rollout, when a turn is continued",
        bad="Far below `interruptions_total`: interrupted work is not taken up again.",
    )
    failovers_total = counter(
        "Engine calls moved to another engine because theirs failed.",
        source="rollout, when a call fails",
        bad="Rises: engines fail; look at `engine_quarantined_total`.",
    )
    journal_bytes = gauge(
        "Size of the journal of trajectories in flight.",
        unit="bytes",
        source="queue.journal, after each write",
        bad="Above 8 bytes for each token in flight, times four: compaction does not keep up.",
    )
    journal_written_bytes_total = counter(
        "Bytes written to the journal, compaction included.",
        unit="bytes",
        source="queue.journal, after each write",
        bad="Near what the disk can write: raise `queue.journal_s`.",
    )
    journal_corrupt_records_total = counter(
        "Records of the journal that failed their checksum at a restart.",
        source="queue.journal, at start",
        bad="Above 0: the disk lies.",
    )
    resumed_tokens_total = counter(
        "Sampled tokens that were taken over from the journal after a restart.",
        unit="tokens",
        source="rollout, when a trajectory goes on",
        bad="0 after a restart that had work in flight: set `queue.journal_s`.",
    )
    resume_discarded_tokens_total = counter(
        "Sampled tokens of the journal that were not used, because an agent loop took another course.",
        unit="tokens",
        source="rollout, when a trajectory leaves its journal",
        bad="A large share of those resumed: a tool or loop is not deterministic; docs/guide/recovering.md.",
    )


class RoutingMetrics(Instruments):
    """Routing replay."""

    routing_rows_total = counter(
        "Routing rows checked before training.",
        unit="rows",
        source=_STEP,
        bad="0 with `routing.replay: r3`: nothing is replayed.",
    )
    routing_rows_invalid_total = counter(
        "Routing rows never reported, so replayed natively by the trainer.",
        unit="rows",
        source=_STEP,
        bad="Above 1% of `routing_rows_total`: engines do not report routing; only servers that "
        "we start are told to, and only of MoE models.",
    )
    replay_rejected_total = counter(
        "Times routing was rejected because it does not fit, by reason.",
        "reason",
        source="rollout.session.routing_rows and queue.packing, when rows are checked",
        bad="Above 0: the reasons are explained at `Misalignment` in `async_rl/errors.py`.",
    )
    routing_payloads_total = counter(
        "Answers that came with routing: of all tokens (full), of the end only (delta), for it alone "
        "(recovery).",
        "kind",
        source="rollout.session.routing_rows, with each answer",
        bad="Mostly `full` with several turns: calls move between engines. Many `recovery`: calls end "
        "without rows, so engines die or aborts meet queued calls.",
    )
    routing_mixed_versions_total = counter(
        "Answers whose rows are of several weight versions, though updates flush the prefix cache.",
        source="rollout.session.routing_rows, with each answer",
        bad="Above 0: the flush did not happen, or weights changed under a running call. The engine gets a "
        "strike.",
    )
    routing_flip_ratio = histogram(
        "Share of the experts of an interrupted turn's tokens that the next weights replaced; a sample.",
        buckets=SHARES,
        unit="share",
        source="rollout.session.routing_rows, when a turn goes on under new weights",
        bad="Near 1: the turn's old log-probs are of another function; lower the learning rate or "
        "`rollout.max_staleness`.",
    )


class EngineMetrics(Instruments):
    """Engines."""

    engine_up = gauge(
        "1 while an engine takes requests, else 0.",
        "engine",
        source="engines.pool, when its state changes",
        bad="0 for longer than a weight update: it failed; its log is in the run folder.",
    )
    engine_weight_version = gauge(
        "Weight version an engine was last attested at.",
        "engine",
        unit="versions",
        source="engines.pool, when it is attested",
        bad="Behind `trainer_weight_version` for longer than an update: the engine is left behind.",
    )
    engine_running_requests = gauge(
        "Calls that are open on an engine.",
        "engine",
        source="engines.pool, at the begin and end of each call",
        bad="Very unequal between engines: see `engine_load_imbalance`.",
    )
    engine_quarantined_total = counter(
        "Times an engine was taken out of service.",
        "engine",
        source="engines.pool, when it happens",
        bad="Rises: the engine fails again and again; see its log and docs/design/engines.md.",
    )
    engine_restarts_total = counter(
        "Restarts of engines by result (ok, failed).",
        "engine",
        "result",
        source="engines.repair, after each try",
        bad="`failed` rises: the machine cannot run it any more.",
    )
    engine_stalls_total = counter(
        "What an engine was found not to do: answer (unreachable), go on with any call (silent), with "
        "one of several (call), or begin one (overtaken).",
        "engine",
        "kind",
        source="engines.health, when it finds one",
        bad="Rises: docs/design/engines.md explains each kind and its limit.",
    )
    engine_load_imbalance = gauge(
        "Highest load of a serving engine in tokens, over the mean of all.",
        source="engines.health, at each look",
        bad="Above 2 for long: few, very long trajectories, or engines that came back.",
    )
    first_token_seconds = histogram(
        "From asking for an engine to the first token: of a new trajectory, the next call of one whose "
        "prefix is cached, or one that must be prefilled again.",
        "kind",
        buckets=SECONDS,
        unit="seconds",
        source="engines.pool, with the first token of each call",
        bad="Grows: engines are overloaded, or prefixes are lost (`prefilled_again_tokens_total`).",
    )
    prefilled_again_tokens_total = counter(
        "Tokens whose keys and values had been computed before, by why they were lost (update, failover, "
        "moved, evicted).",
        "cause",
        unit="tokens",
        source="engines.pool, with the first token of each call",
        bad="`evicted` or `moved` rise: too little cache, or too little stickiness.",
    )
    engine_idle_ratio = gauge(
        "Share of engine time without any call, since the start of training.",
        unit="share",
        source=_BATCH,
        bad="High: rollouts wait for the trainer. More ranks, or fewer engines.",
    )
    hand_over_to_trainer_seconds = histogram(
        "Shared devices: from the end of the engines' turn to the trainer's memory being back.",
        buckets=SECONDS,
        unit="seconds",
        source="run.device_sharing, once a turn",
        bad="Far above the time to copy the trainer's state: an engine hangs; docs/guide/scaling-up.md.",
    )
    hand_over_to_engines_seconds = histogram(
        "Shared devices: from the last step of the trainer's turn to all engines serving its weights.",
        buckets=SECONDS,
        unit="seconds",
        source="run.device_sharing, once a turn",
        bad="Mostly the publishing and loading of weights: put the run folder on a fast disk.",
    )
    engine_pause_seconds = histogram(
        "Time an engine took no requests in a weight update, beyond the transfer itself.",
        buckets=SECONDS,
        unit="seconds",
        source="weights.weight_sync, after each update of an engine",
        bad="Above 0.1: aborting, verifying or resuming is slow; docs/design/weight-updates.md.",
    )


class TrainerMetrics(Instruments):
    """Trainer, weights and trackers."""

    trainer_weight_version = gauge(
        "Weight version the trainer holds.",
        unit="versions",
        source=_BATCH,
        bad="Does not rise: see `trainer_idle_ratio`.",
    )
    trainer_restarts_total = counter(
        "Times the trainer was started again from its newest checkpoint.",
        source="run.trainer_restarts, before each restart",
        bad="Rises: ranks die or hang; the run ends after `trainer.max_restarts`.",
    )
    checkpoint_step = gauge(
        "Step of the newest checkpoint that stands on the disk.",
        unit="steps",
        source="run, when it has become whole",
        bad="Falls behind `trainer_weight_version` by more than two `trainer.checkpoint_every`: what lies "
        "between is lost if the trainer dies. The disk is slow, or see `checkpoint_failures_total`.",
    )
    checkpoint_pause_seconds = gauge(
        "How long the trainer stood still for the last checkpoint, to copy its state.",
        unit="seconds",
        source="run, when it has become whole",
        bad="Much above the state's bytes over the speed of memory: the host swaps.",
    )
    checkpoint_write_seconds = gauge(
        "How long the last checkpoint was written beside the training.",
        unit="seconds",
        source="run, when it has become whole",
        bad="Above the time of `trainer.checkpoint_every` steps: the next one waits for it. A faster disk, "
        "or rarer checkpoints.",
    )
    checkpoint_failures_total = counter(
        "Checkpoints that could not be written.",
        source="run.checkpoints, when the trainer has told it",
        bad="Rises: the log says why; the run ends after `trainer.max_failed_checkpoints` in a row.",
    )
    weight_sync_seconds = histogram(
        "Duration of a weight update by phase (snapshot, interrupt, transfer, verify, total).",
        "phase",
        buckets=SECONDS,
        unit="seconds",
        source="weights.weight_sync, after each update",
        bad="The longest phase is where the time goes; docs/design/weight-updates.md.",
    )
    weight_delta_fallbacks_total = counter(
        "Updates of one engine by whole files in place of a delta.",
        "reason",
        source="weights.local_folders, in each update with `weights.transport: delta`",
        bad="Rises with every version: deltas gain nothing, see the log; `no_actor`: external servers "
        "take no deltas.",
    )
    weight_sync_hidden_seconds_total = counter(
        "Time in which weights were on their way to the engines while the trainer trained on.",
        unit="seconds",
        source="run, after each step with `weights.overlap`",
        bad="Does not rise with `weights.overlap`: the trainer waits for batches, not for weight updates.",
    )
    train_step_seconds = histogram(
        "Duration of a trainer step.",
        buckets=SECONDS,
        unit="seconds",
        source=_STEP,
        bad="Longer than the rollouts of a batch take: the trainer is the bottleneck.",
    )
    batch_wait_seconds = histogram(
        "Time the trainer waited for a batch before a step.",
        buckets=SECONDS,
        unit="seconds",
        source=_BATCH,
        bad="Long: the engines are the bottleneck. More engines, or a larger `rollout.max_staleness`.",
    )
    trainer_idle_ratio = gauge(
        "Share of time the trainer waited for a batch, since the start of training.",
        unit="share",
        source=_BATCH,
        bad="High: as `batch_wait_seconds`.",
    )
    tracker_steps_lost_total = counter(
        "Steps that did not reach a tracker, by why (failed, full).",
        "tracker",
        "cause",
        source="observability.trackers, when it happens",
        bad="Above 0: the tracker's service or disk is slow or gone; the log has the first error. Training "
        "goes on, `metrics.jsonl` has every step.",
    )


class HealthMetrics(Instruments):
    """Standing still."""

    rollout_worker_restarts_total = counter(
        "Times a rollout worker was started again.",
        source="rollout.workers.worker_backend, when one has ended or fallen silent",
        bad="Rises: user code ends its process or blocks its event loop; the log names the worker, and its "
        "own log the code. What it played goes on in another.",
    )
    seconds_since_progress = gauge(
        "Seconds since a token, the end of a trajectory, a step or an engine that serves.",
        unit="seconds",
        source="run.doctor, at each look",
        bad="Above 300 (or the longest trainer step, where rollouts reach their bound during it): alert on "
        "this one; `async-rl doctor` says what is waited for.",
    )
    oldest_wait_seconds = gauge(
        "Age of the oldest open wait, by what is awaited; 0 for none.",
        "awaited",
        unit="seconds",
        source="run.doctor, at each look",
        bad="The one that only rises is what everything waits for.",
    )
    stalls_total = counter(
        "Times the run stood still or a wait was over its limit, by what was awaited.",
        "awaited",
        source="run.doctor, when it finds one",
        bad="Above 0: look into the log.",
    )
    disk_free_bytes = gauge(
        "Free bytes where the run folder lies.",
        unit="bytes",
        source=_PULSE,
        bad="Below 10% of `disk_size_bytes`: free some. A full disk ends the run; what was done is kept.",
    )
    disk_size_bytes = gauge(
        "Size of the disk where the run folder lies.",
        unit="bytes",
        source=_PULSE,
        bad="None: free space is a share of it.",
    )
    event_loop_lag_seconds = histogram(
        "How late the event loop came to a tick of a second.",
        buckets=SECONDS,
        unit="seconds",
        source="observability.loop_watchdog, each second",
        bad="A p99 above 1: blocking code in a tool, reward or loop.",
    )
    event_loop_blocked_total = counter(
        "Times the event loop stood still for `doctor.blocked_s`.",
        source="observability.loop_watchdog, when it happens",
        bad="Above 0: the log has the stack.",
    )


class Metrics(
    PolicyMetrics,
    EvaluationMetrics,
    AgreementMetrics,
    FlowMetrics,
    PartialMetrics,
    RoutingMetrics,
    EngineMetrics,
    TrainerMetrics,
    HealthMetrics,
):
    """All instruments of one run.

    Example:
        >>> metrics = Metrics()
        >>> metrics.trajectories_dropped_total.labels(reason="stale").inc()
    """

    def observe_checkpoint(self, step: int, pause_s: float, write_s: float) -> None:
        """Take over what there is to say of a checkpoint that stands."""
        self.checkpoint_step.set(step)
        self.checkpoint_pause_seconds.set(pause_s)
        self.checkpoint_write_seconds.set(write_s)

    def observe_evaluation(self, record: EvaluationRecord) -> None:
        """Take over what the record of an evaluation says."""
        self.evaluations_total.labels(record.status).inc()
        for reason, count in record.dropped.items():
            self.evaluation_answers_total.labels(reason).inc(count)
        if record.status == "missing":
            return
        self.evaluation_weight_version.set(record.weight_version)
        self.evaluation_seconds.observe(record.duration_s)
        for name, score in record.scores.items():
            if name == EVERYTHING:
                self.evaluation_answers_total.labels("scored").inc(score.answers)
            if score.reward.value is not None:
                self.evaluation_reward.labels(name).set(score.reward.value)
            for k, estimate in score.pass_at.items():
                if estimate.value is not None:
                    self.evaluation_pass_share.labels(name, k).set(estimate.value)

    def observe_step(self, record: StepRecord) -> None:
        """Take over what a step's record says of policy, routing, tokens and times.

        Trajectory counts, engines, staleness and weight updates are reported where they happen.
        """
        for instrument, figure in (
            (self.reward, record.reward_mean),
            (self.loss, record.loss),
            (self.ppo_kl, record.ppo_kl),
            (self.ppo_kl_bypass, record.ppo_kl_bypass),
            (self.rollout_kl.labels("0"), record.rollout_kl_lag0),
            (self.rollout_kl.labels("1"), record.rollout_kl_lag1),
            (self.rollout_kl.labels("2+"), record.rollout_kl_lag2_up),
            (self.kl_mismatch_nats, record.kl_mismatch),
            (self.kl_staleness_nats, record.kl_staleness),
            (self.clip_fraction, record.clip_fraction),
            (self.entropy_nats, record.entropy),
            (self.grad_norm, record.grad_norm),
            (self.learning_rate, record.learning_rate),
            (self.importance_ratio_mean, record.importance_ratio_mean),
            (self.importance_ratio.labels("0.01"), record.importance_ratio_p1),
            (self.importance_ratio.labels("0.5"), record.importance_ratio_p50),
            (self.importance_ratio.labels("0.99"), record.importance_ratio_p99),
            (self.importance_ratio.labels("0.999"), record.importance_ratio_p999),
            (self.importance_rejected_fraction, record.importance_rejected_fraction),
            (self.reference_kl_nats, record.reference_kl),
            (self.effective_sample_share, record.effective_sample_share),
            (self.log_prob_diff_nats, record.log_prob_diff),
            (self.log_prob_abs_diff_nats, record.log_prob_abs_diff),
            (self.lag0_log_prob_abs_diff_nats, record.lag0_log_prob_abs_diff),
            (self.log_prob_diff_extreme_nats, record.log_prob_diff_extreme),
            (self.length_ks, record.length_ks),
        ):
            instrument.set(math.nan if figure is None else figure)
        self.updates_skipped_total.inc(record.updates_skipped)
        self.weight_sync_hidden_seconds_total.inc(record.sync_hidden_s)
        if record.kl_routing is not None:  # between two probes the last one stands
            self.kl_routing_nats.set(record.kl_routing)
        for routing, figure in (
            ("native", record.routing_native_abs_diff),
            ("replayed", record.routing_replayed_abs_diff),
        ):
            if figure is not None:
                self.routing_probe_abs_diff_nats.labels(routing).set(figure)
        self.trainer_weight_version.set(record.weight_version)
        self.tokens_per_second.set(record.tokens_per_s)
        self.trained_tokens_total.inc(record.trained_tokens)
        self.masked_tokens_total.inc(record.masked_tokens)
        self.routing_rows_total.inc(record.routing_rows)
        self.routing_rows_invalid_total.inc(record.routing_rows_invalid)
        self.train_step_seconds.observe(record.step_s)
        self.batch_wait_seconds.observe(record.wait_s)
