"""Every Prometheus instrument of a run, declared here and nowhere else.

An attribute `x` of `Metrics` is the metric `async_rl_x`. Names end in their unit; counters end in `_total`.
Each class below is a section of `docs/reference/metrics.md`, which is generated from it (`make docs`).

```
class Metrics(Instruments):
    journal_bytes = gauge("Size of the journal ...", bad="...")
        │
        ├─► an instance: an instrument of the client library, in the instance's own registry
        └─► declared(Metrics): its `Description`
```

Figures of a trainer step are described in `figures.STEP_FIGURES` instead. To type checkers an attribute is
the instrument, which it is on every instance.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Iterable, Sequence
from typing import Any, Final, Self

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from async_rl.observability.evaluation_record import EVERYTHING, EvaluationRecord
from async_rl.observability.figures import SECONDS, STEP_FIGURES, Description, counter, gauge, histogram
from async_rl.observability.records import StepRecord, is_finite
from async_rl.runtime.printable import without_surrogates

PREFIX = "async_rl_"


def value_of(metric: Counter | Gauge) -> float:
    """Return the value of a metric or of a labelled child; the library's public API only has scrapes."""
    return float(metric._value.get())


def totals_of(histogram: Histogram) -> tuple[float, float]:
    """Return the sum and the number of observations of a histogram, or of a labelled child."""
    return float(histogram._sum.get()), sum(float(bucket.get()) for bucket in histogram._buckets)


def observe_all(histogram: Histogram, values: Sequence[float]) -> None:
    """Observe values of a histogram without labels, the buckets of all of them at once."""
    bounds = histogram._upper_bounds
    for index, number in Tally(bisect_left(bounds, value) for value in values).items():
        histogram._buckets[index].inc(number)
    histogram._sum.inc(sum(values))


class Instruments:
    """The instruments that a class declares, created in a registry of their own.

    Two runs in one process, as in tests, therefore share nothing.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        for name, description in declared(type(self)).items():
            setattr(self, name, description.make(PREFIX + name, self.registry))


def declared(instruments: type[Instruments]) -> dict[str, Description]:
    """Return the descriptions of a class and its bases by name, in the order of its bases."""
    return {
        name: value.named(name)
        for part in instruments.__mro__
        for name, value in vars(part).items()
        if isinstance(value, Description)
    }


_MAX_TOOLS: Final = 100
"""The most tools that metrics tell apart: each adds 36 time series."""
_MAX_TOOL_CHARS: Final = 100

TOKENS = tuple(float(1 << n) for n in range(4, 18))
"""Buckets from 16 to 131072 tokens."""
SHARES = (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Buckets for shares: zero, then from one in a thousand to all."""
VERSIONS = tuple(float(n) for n in range(17))


class StepMetrics(Instruments):
    """Trainer steps, as of the last one."""


for _description in STEP_FIGURES.values():
    if _description.metric and not hasattr(StepMetrics, _description.metric):
        setattr(StepMetrics, _description.metric, _description)


class EvaluationMetrics(Instruments):
    """Validation sets, as of the last evaluation."""

    evaluation_reward = gauge(
        "Mean reward over the tasks of a validation set.",
        "set",
        bad="Falls while the training reward rises: the policy fits its training tasks, or games their "
        "reward.",
    )
    evaluation_pass_share = gauge(
        "Estimated pass@k of a validation set.",
        "set",
        "k",
        bad="pass@1 rises and pass@k of a large k falls: the policy narrows. Raise the entropy bonus, or the "
        "KL penalty.",
    )
    evaluation_weight_version = gauge(
        "Weight version of the last evaluation that came to its end.",
        bad="Stays behind `trainer_weight_version` by more than `evaluation.every`: they fail, or take too "
        "long.",
    )
    evaluation_seconds = histogram(
        "Duration of an evaluation, from its first question on.",
        buckets=(*SECONDS, 1000, 2500, 5000),
        bad="Longer than `evaluation.every` versions take: fewer answers, or more `evaluation.engines`.",
    )
    evaluations_total = counter(
        "Evaluations by result (done, missing).",
        "result",
        bad="`missing` rises: the log says why, as `evaluations.jsonl` does.",
    )
    evaluation_answers_total = counter(
        "Answers of evaluations by result (scored, or why one was dropped).",
        "result",
        bad="`mixed_version` above 0: somebody else loads weights into the engines.",
    )


class FlowMetrics(Instruments):
    """Trajectories from dispatch to settlement.

    At every moment dispatched = in flight + queued + trained + dropped.
    """

    trajectories_dispatched_total = counter(
        "Trajectories handed to an agent loop.",
        bad="Does not rise: admission is closed, which `oldest_wait_seconds` explains.",
    )
    trajectories_in_flight = gauge(
        "Trajectories dispatched and not yet finished with their group.",
        bad="Far below `rollout.max_concurrent_trajectories`: the staleness bound holds work back, or the "
        "data has ended.",
        start=0,
    )
    trajectories_queued = gauge(
        "Trajectories of finished groups that wait for the trainer.",
        bad="At its bound all the time: the trainer is the bottleneck. Always 0: the engines are.",
        start=0,
    )
    trajectories_trained_total = counter(
        "Trajectories consumed by a trainer step.",
        bad="Dispatched minus in flight, queued, trained and dropped is not 0 for longer than a scrape: a "
        "bug of ours; please report it.",
    )
    trajectories_dropped_total = counter(
        "Trajectories that will never be trained, by reason.",
        "reason",
        bad="Rises: work is lost; docs/design/staleness.md explains the reasons.",
    )
    queue_bytes = gauge(
        "Bytes of finished trajectories held in the spool, on the node that has the most.",
        bad="Near `queue.max_bytes`: dispatch stops there; raise it or lower `rollout.max_staleness`.",
    )
    trajectory_tokens = histogram(
        "Tokens of finished trajectories, prompt and all turns.",
        buckets=TOKENS,
        bad="Piles up at `rollout.max_context_tokens`: answers are cut.",
    )
    staleness_versions = histogram(
        "Trainer version minus oldest sampled version of each trained trajectory.",
        buckets=VERSIONS,
        bad="Never above `rollout.max_staleness`. Mostly at it: rollouts are too far ahead; fewer engines "
        "or a faster trainer.",
    )
    max_staleness_versions = gauge(
        "`rollout.max_staleness` of the run: the bound of the above.",
        bad="None: it is what the config says.",
    )
    stage_wait_seconds = histogram(
        "Waiting of one piece of work in one stage (admission, engine, queue).",
        "stage",
        bad="The stage with the long waits is the one before the bottleneck.",
    )
    curriculum_draws_total = counter(
        "Tasks drawn by `data.curriculum` since the start of this process, by pool.",
        "pool",
        bad="One pool has nearly all: move the bounds of the pools, or change their weights.",
    )
    curriculum_tasks = gauge(
        "Tasks that `data.curriculum` may draw, by pool.",
        "pool",
        bad="`hard` does not shrink: the policy does not learn from what it is given. `unseen` does not "
        "shrink: the run is too short for its tasks.",
    )
    attempts_total = counter(
        "Attempts that have ended, by how: `success` (`evaluation.pass_reward` is reached) or the kind of "
        "failure.",
        "end",
        bad="`tool_broken`, `sandbox_lost`, `time_over` or `other` rises: what is around the agent fails; "
        "`async-rl inspect` has examples.",
    )
    trajectory_retries_total = counter(
        "Attempts at trajectories after their first one failed.",
        bad="Rises: a loop, tool or reward fails; the log says which.",
    )
    task_retries_total = counter(
        "Times a task was given out again because its group was lost.",
        "reason",
        bad="Rises: as `trajectories_dropped_total`.",
    )
    reward_seconds = histogram(
        "Duration of one call of a reward, however it ended.",
        "reward",
        bad="Close to its timeout: calls fail, and their trajectories with them, which hold slots meanwhile.",
    )
    reward_errors_total = counter(
        "Trajectories that a reward failed, by cause: it raised or returned no finite number (reward), or "
        "what it needs failed or was too slow (infrastructure).",
        "reward",
        "cause",
        bad="Rises: the attempt is made again or dropped (`reward_error`, `reward_unavailable`), never "
        "scored 0; the log says why.",
    )
    reward_retries_total = counter(
        "Calls of a reward that were made again after one that failed.",
        "reward",
        bad="Rises: the server behind it is overloaded or gone.",
    )
    tool_calls_total = counter(
        "Tool calls by tool and status (ok, error); `unknown` is what the policy makes up, `other` all tools "
        "after the first 100.",
        "tool",
        "status",
        bad="`error` rises: tools that raise or time out; the model reads the error as text.",
    )
    tool_seconds = histogram(
        "Duration of a tool call, by tool.",
        "tool",
        bad="Near `rollout.tool_timeout_s`: calls are cut; make the tool faster or raise the limit.",
    )
    tool_wait_seconds = histogram(
        "Wait of a tool call for others of the same tool to end, by tool.",
        "tool",
        bad="As long as the calls themselves: raise the tool's `max_concurrent`, if it bears more.",
    )
    openai_requests_total = counter(
        "Requests of agents over OpenAI's API by result: answered, repeated (the earlier answer once more), "
        "another (a conversation begins), refused.",
        "result",
        bad="`repeated` rises: clients lose connections or are impatient. `another` rises with an agent that "
        "should have one conversation: it edits its history. `refused`: the agent's log says why.",
    )
    openai_ignored_total = counter(
        "Parameters of such requests that were ignored, because they would change what is sampled.",
        "parameter",
        bad="Not bad by itself: set `rollout.temperature` and the like if the agent's values are wanted.",
    )
    sampled_tokens_total = counter(
        "Tokens sampled by engines.",
        bad="Does not rise while trajectories are in flight: see `seconds_since_progress`.",
    )


class PartialMetrics(Instruments):
    """Partial rollouts and restarts."""

    interruptions_total = counter(
        "Engine calls cut short by a weight update.",
        bad="No token is lost. Many per trajectory: updates are frequent for answers of this length.",
    )
    resumes_total = counter(
        "Engine calls that continued an interrupted turn.",
        bad="Far below `interruptions_total`: interrupted work is not resumed.",
    )
    failovers_total = counter(
        "Engine calls moved to another engine because theirs failed.",
        bad="Rises: engines fail; look at `engine_quarantined_total`.",
    )
    journal_bytes = gauge(
        "Size of the journal of trajectories in flight.",
        bad="Above 8 bytes for each token in flight, times four: compaction does not keep up.",
        start=0,
    )
    journal_written_bytes_total = counter(
        "Bytes written to the journal, compaction included.",
        bad="Near what the disk can write: raise `queue.journal_s`.",
    )
    journal_corrupt_records_total = counter(
        "Records of the journal that failed their checksum at a restart.",
        bad="Above 0: the disk corrupts data.",
    )
    attempts_restarted_total = counter(
        "Attempts that began again from their prompts, because no journal had a token of them, or the frames "
        "that they had made were lost with a node.",
        bad="More than a few when a process ends: a node was lost with its journal (`queue.journal_dir`) or "
        "with frames (`queue.spool_dir`).",
    )
    late_results_total = counter(
        "What counted for nothing because another owner has the trajectory: results of attempts and rewards "
        "that the driver no longer waited for, and trajectories in journals of earlier owners.",
        bad="Grows although no worker ends and nothing is cancelled: two processes work on one trajectory.",
    )
    resumed_tokens_total = counter(
        "Sampled tokens restored from the journal after a restart.",
        bad="0 after a restart that had work in flight: set `queue.journal_s`.",
    )
    resume_discarded_tokens_total = counter(
        "Sampled tokens of the journal that were not used, because an agent loop acted differently.",
        bad="A large share of the restored tokens: a tool or loop is not deterministic; "
        "docs/guide/recovering.md.",
    )


class RoutingMetrics(Instruments):
    """Routing replay."""

    answers_discarded_total = counter(
        "Answers of engines that were discarded: without a finish (`no_finish`), versions that do not cover "
        "the tokens or are none of this run's (`wrong_versions`), weights older than the lease "
        "(`older_weights`), weights that this run has not published (`unpublished_weights`), log-probs that "
        "are not finite (`not_finite`), sampling masks that are missing or exclude their token "
        "(`wrong_mask`).",
        "reason",
        bad="Above 0: the engine gets a strike, and its log says more. `older_weights`: its server was "
        "restarted under a call, or answers a request of an earlier epoch. `unpublished_weights`: somebody "
        "else, such as another run, updates the engine.",
    )
    replay_rejected_total = counter(
        "Times routing was rejected because it does not fit, by reason.",
        "reason",
        bad="Above 0: the reasons are explained at `Misalignment` in `async_rl/errors.py`.",
    )
    routing_payloads_total = counter(
        "Answers that came with routing: of all tokens (full), of the end only (delta), for it alone "
        "(recovery).",
        "kind",
        bad="Mostly `full` with several turns: calls move between engines. Many `recovery`: calls end "
        "without rows, so engines die or aborts meet queued calls.",
    )
    routing_mixed_versions_total = counter(
        "Answers whose rows are of several weight versions, though updates flush the prefix cache.",
        unit="answers",
        bad="Above 0: the flush did not happen, or weights changed under a running call. The engine gets a "
        "strike.",
    )
    routing_flip_ratio = histogram(
        "Share of the experts of an interrupted turn's tokens that the next weights replaced; a sample.",
        buckets=SHARES,
        unit="share",
        bad="Near 1: the turn's old log-probs are of another function; lower the learning rate or "
        "`rollout.max_staleness`.",
    )


class EngineMetrics(Instruments):
    """Engines."""

    engine_up = gauge(
        "1 while an engine takes requests, else 0.",
        "engine",
        bad="0 for longer than a weight update: it failed; its log is in the run folder.",
    )
    engine_weight_version = gauge(
        "Weight version that an engine last verifiably served.",
        "engine",
        bad="Behind `trainer_weight_version` for longer than an update: the engine is left behind.",
    )
    engine_running_requests = gauge(
        "Open calls of an engine.",
        "engine",
        bad="Very unequal between engines: see `engine_load_imbalance`.",
    )
    engine_call_limit = gauge(
        "The most calls that an engine is given at once, at the reason that decides it, and 0 at the others: "
        "setting (`engine.max_calls`, `engine.max_running_requests`), cache (what its KV cache holds), "
        "retractions (less than that, because it retracted calls), refusals (it refused calls).",
        "engine",
        "reason",
        bad="At `setting` while `engine_running_requests` has reached it: the cache would hold more.",
    )
    engine_quarantined_total = counter(
        "Times an engine was taken out of service.",
        "engine",
        bad="Rises: the engine fails again and again; see its log and docs/design/engines.md.",
    )
    engine_retractions_total = counter(
        "Times an engine took the KV cache of a running call for others and prefilled the call again later.",
        "engine",
        bad="Rises by more than a tenth of its calls: they do not fit its memory. Their tokens are prefilled "
        "again, and the routing rows that sampled them are lost (`routing_rows_recomputed_total`); set "
        "`engine.max_calls: adaptive`, or to a lower number.",
    )
    engine_busy_total = counter(
        "Calls that an engine refused because it takes no more for now (429, 503 with Retry-After, a full "
        "queue).",
        "engine",
        bad="Rises: the engine, or a proxy before it, takes fewer calls than it is given; raise its limit.",
    )
    local_shortages_total = counter(
        "Calls that the driver could not make for lack of file descriptors, ports or memory.",
        bad="Above 0: raise the limit of open files (`ulimit -n`), or run fewer trajectories at once.",
    )
    engine_restarts_total = counter(
        "Restarts of engines by result (ok, failed).",
        "engine",
        "result",
        bad="`failed` rises: the machine cannot run it any more.",
    )
    engine_stalls_total = counter(
        "Stalls of an engine by kind: no answer (unreachable), no call progresses (silent), one of several "
        "stalls (call), or one does not begin (overtaken).",
        "engine",
        "kind",
        bad="Rises: docs/design/engines.md explains each kind and its limit.",
    )
    model_call_seconds = histogram(
        "Time of an answer of a further model: the scores of a trajectory, or a judge's text.",
        "model",
        bad="Grows: the model's engines are overloaded; raise `models.NAME.num_engines`.",
    )
    judge_answers_total = counter(
        "Questions of a reward to its judge: answered with a score (scored), known from an equal question "
        "(cached), or answered without a score (no_score).",
        "reward",
        "result",
        bad="`no_score` rises: the judge does not follow the template; change it, or `score`.",
    )
    model_retries_total = counter(
        "Calls to the engines of a further model that failed and were made again.",
        "model",
        bad="Rises: its engines fail; their logs are in `logs/NAME` of the run folder.",
    )
    engine_load_imbalance = gauge(
        "Highest load of a serving engine in tokens, over the mean of all.",
        bad="Above 2 for long: few, very long trajectories, or engines that came back.",
    )
    first_token_seconds = histogram(
        "From asking for an engine to the first token: of a new trajectory, the next call of one whose "
        "prefix is cached, or one that must be prefilled again.",
        "kind",
        bad="Grows: engines are overloaded, or prefixes are lost (`prefilled_again_tokens_total`).",
    )
    prefilled_again_tokens_total = counter(
        "Tokens whose keys and values had been computed before, by why they were lost (update, failover, "
        "moved, evicted).",
        "cause",
        bad="`evicted` or `moved` rise: too little cache, or too little stickiness.",
    )
    hand_over_to_trainer_seconds = histogram(
        "Shared devices: from the end of the engines' phase until the trainer's memory is restored.",
        bad="Far above the time to copy the trainer's state: an engine hangs; docs/guide/scaling-up.md.",
    )
    hand_over_to_engines_seconds = histogram(
        "Shared devices: from the last step of the trainer's phase until all engines serve its weights.",
        bad="Mostly the publishing and loading of weights: put the run folder on a fast disk.",
    )
    engine_pause_seconds = histogram(
        "Time an engine took no requests in a weight update, beyond the transfer itself.",
        bad="Above 0.1: aborting, verifying or resuming is slow; docs/design/weight-updates.md.",
    )


class TrainerMetrics(Instruments):
    """Trainer, weights and trackers."""

    trainer_weight_version = gauge(
        "Weight version the trainer holds.",
        bad="Does not rise: see `trainer_idle_ratio`.",
    )
    restart_log_prob_abs_diff_nats = gauge(
        "Mean absolute trainer minus rollout log-prob in the last step before the newest restart of driver "
        "or trainer, and in the first one after it (`when`), over all tokens or those of the trainer's own "
        "version (`tokens`: all, lag0).",
        "tokens",
        "when",
        bad="Jumps from `before` to `after`: trainer or engines did not restore the weights that they had.",
    )
    trainer_restarts_total = counter(
        "Times the trainer was started again from its newest checkpoint.",
        bad="Rises: ranks die or hang; the run ends after `trainer.max_restarts`.",
    )
    checkpoint_step = gauge(
        "Step of the newest checkpoint that stands on the disk.",
        bad="Falls behind `trainer_weight_version` by more than two `trainer.checkpoint_every`: what lies "
        "between is lost if the trainer dies. The disk is slow, or see `checkpoint_failures_total`.",
    )
    checkpoint_pause_seconds = gauge(
        "How long the last checkpoint paused the trainer, to copy its state.",
        bad="Much above the state's bytes over the speed of memory: the host swaps.",
    )
    checkpoint_write_seconds = gauge(
        "How long the last checkpoint was written beside the training.",
        bad="Above the time of `trainer.checkpoint_every` steps: the next one waits for it. A faster disk, "
        "or rarer checkpoints.",
    )
    checkpoint_failures_total = counter(
        "Checkpoints that could not be written.",
        bad="Rises: the log says why; the run ends after four in a row.",
    )
    weight_sync_seconds = histogram(
        "Duration of a weight update by phase: snapshot, publish (files or checksums), connect, interrupt, "
        "gather (fill buckets), send, load, verify, total.",
        "phase",
        bad="The longest phase is where the time goes; docs/design/weight-updates.md.",
    )
    weight_sync_bytes_total = counter(
        "Bytes of weights that the trainer wrote or sent to engines.",
        bad="More than the model's per version: engines are in groups of their own, as those that others "
        "started are.",
    )
    served_weights_unchanged = gauge(
        "1 if an engine had the checksums, or the log-probs of a fixed text, of an earlier version although "
        "the trainer's weights had changed, when it was last compared, every 20 versions.",
        "engine",
        unit="1",
        bad="1: the engine samples from old weights under a new version; restart it, and set "
        "`weights.verify: checksum`.",
    )
    weight_delta_fallbacks_total = counter(
        "Updates of one engine by whole files in place of a delta.",
        "reason",
        bad="Rises with every version: deltas gain nothing, see the log; `no_actor`: external servers "
        "take no deltas.",
    )
    trainer_idle_ratio = gauge(
        "Share of time the trainer waited for a batch, since the start of training.",
        unit="share",
        bad="High: as `batch_wait_seconds`.",
    )
    tracker_steps_lost_total = counter(
        "Steps that did not reach a tracker, by why (failed, full).",
        "tracker",
        "cause",
        bad="Above 0: the tracker's service or disk is slow or gone; the log has the first error. Training "
        "continues, `metrics.jsonl` has every step.",
    )


class HealthMetrics(Instruments):
    """Stalls and health."""

    rollout_worker_restarts_total = counter(
        "Times a rollout worker was started again.",
        bad="Rises: user code ends its process or blocks its event loop; the log names the worker, and its "
        "own log the code. What it played continues in another.",
    )
    user_processes_reaped_total = counter(
        "Trees of processes of user code that had outlived what started them and were ended, by kind "
        "(sandbox, mcp_server, agent_program, other) and reason: attempt_ended, attempt_failed, "
        "attempt_cancelled, run_ended, owner_ended (the driver or rollout worker was killed).",
        "kind",
        "reason",
        bad="An attempt_… rises: a loop or tool leaves processes behind; the log names them. owner_ended: "
        "look for why a driver or worker was killed.",
    )
    seconds_since_progress = gauge(
        "Seconds since the last progress: a token, the end of a trajectory, a step or an engine that serves.",
        unit="seconds",
        bad="Above 300 (or the longest trainer step, where rollouts reach their bound during it): alert on "
        "this one; `async-rl doctor` names the wait.",
    )
    oldest_wait_seconds = gauge(
        "Age of the oldest open wait by kind; 0 if none is open.",
        "awaited",
        bad="The wait whose age only rises holds up the run.",
    )
    stalls_total = counter(
        "Times the run stalled or a wait exceeded its limit, by kind of wait.",
        "awaited",
        bad="Above 0: look into the log.",
    )
    disk_free_bytes = gauge(
        "Free bytes where the run folder lies.",
        bad="Below 10% of `disk_size_bytes`: free some. A full disk ends the run; what was done is kept.",
    )
    disk_size_bytes = gauge(
        "Size of the disk where the run folder lies.",
        bad="None: free space is a share of it.",
    )
    memory_used_bytes = gauge(
        "Memory in use where the driver runs, by all processes of its machine or container.",
        bad="Above 90% of `memory_limit_bytes`: the kernel is about to kill a process.",
    )
    memory_limit_bytes = gauge(
        "Memory of the driver's machine or container, whichever is closer to its limit.",
        bad="None: the memory in use is a share of it.",
    )
    open_descriptors = gauge(
        "Open file descriptors of the driver: connections, pipes and files.",
        bad="Above 80% of `max_descriptors`, or it grows for hours: calls will fail "
        "(`local_shortages_total`).",
    )
    max_descriptors = gauge(
        "The driver's limit of open file descriptors.",
        bad="None: the open ones are a share of it.",
    )
    event_loop_lag_seconds = histogram(
        "How late the event loop came to a tick of a second.",
        bad="A p99 above 1: blocking code in a tool, reward or loop.",
    )
    event_loop_blocked_total = counter(
        "Times the event loop was blocked for 10 s.",
        bad="Above 0: the log has the stack.",
    )


class Metrics(
    StepMetrics,
    EvaluationMetrics,
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

    def __init__(self) -> None:
        super().__init__()
        self._tools: set[str] = set()

    def share(self, metrics: Metrics, names: Iterable[str]) -> Self:
        """Count with some instruments of other metrics from now on, and return these metrics."""
        for name in names:
            setattr(self, name, getattr(metrics, name))
        return self

    def tool_label(self, tool: str) -> str:
        """Return the label of a tool: its name, which an agent may choose, or `other` after 100 names."""
        tool = without_surrogates(tool)
        if len(self._tools) < _MAX_TOOLS and len(tool) <= _MAX_TOOL_CHARS:
            self._tools.add(tool)
        return tool if tool in self._tools else "other"

    def observe_checkpoint(self, step: int, pause_s: float, write_s: float) -> None:
        """Record a checkpoint that is complete on disk."""
        self.checkpoint_step.set(step)
        self.checkpoint_pause_seconds.set(pause_s)
        self.checkpoint_write_seconds.set(write_s)

    def observe_evaluation(self, record: EvaluationRecord) -> None:
        """Record an evaluation."""
        self.evaluations_total.labels(record.status).inc()
        for reason, count in record.dropped.items():
            self.evaluation_answers_total.labels(reason).inc(count)
        if record.status == "missing":
            return
        self.evaluation_seconds.observe(record.duration_s)
        if EVERYTHING in record.scores:
            self.evaluation_answers_total.labels("scored").inc(record.scores[EVERYTHING].answers)
        self._set_evaluation(record)

    def _set_evaluation(self, record: EvaluationRecord) -> None:
        """Set the gauges to an evaluation that came to its end."""
        self.evaluation_weight_version.set(record.weight_version)
        for name, score in record.scores.items():
            if score.reward.value is not None:
                self.evaluation_reward.labels(name).set(score.reward.value)
            for k, estimate in score.pass_at.items():
                if estimate.value is not None:
                    self.evaluation_pass_share.labels(name, k).set(estimate.value)

    def observe_step(self, record: StepRecord) -> None:
        """Record the figures of a step that its record declares.

        Trajectory counts, engines, staleness and weight updates are reported where they happen.
        """
        self.trainer_weight_version.set(record.weight_version)
        for name, figure in STEP_FIGURES.items():
            if not figure.metric:
                continue
            value, instrument = getattr(record, figure.attribute or name), self._of_figure(figure)
            if figure.kind == "counter":
                instrument.inc(value)
            elif figure.kind == "histogram":
                instrument.observe(value)
            elif is_finite(value) or not figure.keep_last:
                instrument.set(math.nan if value is None else value)

    def restore(
        self, step: int, records: Sequence[StepRecord], evaluations: Sequence[EvaluationRecord]
    ) -> None:
        """Set the gauges to what the run had measured by a step, and to NaN what it has not measured.

        Counters and histograms count from 0 in each process, as Prometheus expects.
        """
        self.trainer_weight_version.set(step)
        for name, figure in STEP_FIGURES.items():
            if not figure.metric or figure.kind != "gauge":
                continue
            measured = (getattr(record, figure.attribute or name) for record in reversed(records))
            value = next(filter(is_finite, measured) if figure.keep_last else measured, None)
            self._of_figure(figure).set(math.nan if value is None else value)
        if ended := [record for record in evaluations if record.status != "missing"]:
            self._set_evaluation(ended[-1])

    def _of_figure(self, figure: Description) -> Any:
        """Return the instrument of a figure of a step, or its child with the figure's labels."""
        instrument = getattr(self, figure.metric)
        return instrument.labels(**figure.child) if figure.child else instrument
