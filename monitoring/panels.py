"""What the Grafana dashboard shows: rows of panels, each a sentence and some PromQL.

A panel of steps is described in `async_rl/observability/panels.py`, which the live page draws too;
`_of_steps` asks Prometheus for the same figures. A new metric gets a query here; `make docs` then writes the
dashboard's JSON and its picture. What a metric is need not be said again: each panel's description ends with
the help sentences of its metrics.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal

from async_rl.observability.figures import STEP_FIGURES
from async_rl.observability.panels import PANELS

GREEN, YELLOW, RED, BLUE, GREY, PURPLE = "green", "#EAB839", "red", "blue", "#8e8e8e", "purple"

UNITS: Final = {
    "": "none",
    "nats": "suffix: nats",
    "s": "s",
    "tokens": "si:tok",
    "tokens/s": "si:tok/s",
    "trajectories": "short",
    "versions": "none",
}
"""Grafana's names of units."""


@dataclass(frozen=True)
class Query:
    """A PromQL query that draws one or several lines of a panel."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """A picture of some series.

    `limits` colours values from each number on; a time series draws them as dashed lines. `colors` are of
    legends.
    """

    title: str
    says: str
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: Literal["timeseries", "stat", "heatmap", "state-timeline"] = "timeseries"
    width: int = 8
    height: int = 8
    limits: tuple[tuple[float, str], ...] = ()
    colors: dict[str, str] = field(default_factory=dict)
    maximum: float | None = None
    stacked: bool = False
    below_zero: bool = False


def value(name: str) -> str:
    """Return the series of a metric in the chosen run."""
    return f'async_rl_{name}{{run="$run"}}'


def rate(name: str, *by: str) -> str:
    """Return the rate per second over the chosen window."""
    return _sum(f"rate({value(name)}[$window])", by)


def increase(name: str, *by: str) -> str:
    """Return how much a counter grew in the chosen window."""
    return _sum(f"increase({value(name)}[$window])", by)


def quantile(q: float, name: str, *by: str) -> str:
    """Return a quantile of a histogram's observations in the chosen window."""
    return f"histogram_quantile({q}, {rate(f'{name}_bucket', 'le', *by)})"


def mean(name: str, *by: str) -> str:
    """Return the mean of a histogram's observations in the chosen window."""
    return f"{rate(f'{name}_sum', *by)} / {rate(f'{name}_count', *by)}"


def _sum(expr: str, by: tuple[str, ...]) -> str:
    return f"sum by ({', '.join(by)}) ({expr})" if by else f"sum({expr})"


def _share(part: str, *others: str) -> str:
    """Return the share of one rate in the sum of several."""
    return f"{part} / ({' + '.join((part, *others))})"


def figure(name: str, legend: str = "") -> tuple[Query, ...]:
    """Return the query for a field of `StepRecord`; none if it has no metric."""
    known = STEP_FIGURES.get(name)
    if known is None or not known.metric:
        return ()
    if known.kind == "histogram":
        return (Query(mean(known.metric), legend),)
    labels = "".join(f',{label}="{of}"' for label, of in known.child.items())
    return (Query(f'async_rl_{known.metric}{{run="$run"{labels}}}', legend),)


def _of_steps(name: str, *more: Query, title: str = "", **looks: Any) -> Panel:
    """Return a panel of the live page with its fields' metrics; further queries follow."""
    panel = PANELS[name]
    lines = panel.lines | ({} if panel.band is None else {panel.band[1]: panel.band[0].split()[0]})
    marks = ((panel.look, YELLOW), (panel.wrong, RED))
    shown = {
        "unit": UNITS[panel.unit] if panel.ceiling is None else "percentunit",
        "limits": tuple((value, color) for value, color in marks if value is not None),
        "maximum": panel.ceiling,
        "below_zero": panel.floor is None,
    }
    queries = tuple(query for field, label in lines.items() for query in figure(field, label))
    return Panel(title or panel.title, panel.note, (*queries, *more), **(shown | looks))


def _stat(title: str, says: str, *queries: Query, unit: str = "none", limits: Any = ()) -> Panel:
    return Panel(title, says, queries, unit, "stat", width=3, height=4, limits=limits)


UNACCOUNTED: Final = (
    f"{value('trajectories_dispatched_total')} - {value('trajectories_in_flight')}"
    f" - {value('trajectories_queued')} - {value('trajectories_trained_total')}"
    f" - on (run) (sum by (run) ({value('trajectories_dropped_total')})"
    f" or on (run) 0 * {value('trajectories_in_flight')})"
)

AT_A_GLANCE: Final = (
    _stat(
        "Alerts",
        "Alerts of this run that fire now; the runbook is docs/guide/troubleshooting.md.",
        Query('count(ALERTS{alertstate="firing", run="$run"}) or vector(0)'),
        limits=((1, RED),),
    ),
    _stat(
        "Step",
        "Finished trainer steps; each publishes a weight version.",
        Query(value("trainer_weight_version")),
    ),
    _of_steps("reward", kind="stat", width=3, height=4, unit="short"),
    _of_steps("ppo-kl", kind="stat", width=3, height=4, unit="sci"),
    _stat(
        "Tokens per second",
        "Tokens that the engines sample.",
        Query(value("tokens_per_second")),
        unit="short",
    ),
    _stat(
        "Staleness, p95",
        "Age of trained trajectories in versions; never above rollout.max_staleness.",
        Query(quantile(0.95, "staleness_versions")),
    ),
    _stat(
        "Engines that serve",
        "Share of the engines that accept requests.",
        Query(f"avg({value('engine_up')})"),
        unit="percentunit",
        limits=((0, RED), (0.5, YELLOW), (1, GREEN)),
    ),
    _stat(
        "Since last progress",
        "Falls to zero again and again while the run is healthy.",
        Query(value("seconds_since_progress")),
        unit="s",
        limits=((120, YELLOW), (300, RED)),
    ),
)

FLOW: Final = (
    _of_steps(
        "outstanding",
        Query(value("trajectories_in_flight"), "in flight"),
        Query(value("trajectories_queued"), "queued"),
        stacked=True,
        colors={"in flight": BLUE, "queued": GREEN},
    ),
    Panel(
        "Dispatched and settled",
        "Trajectories per second. In the long run dispatched is trained plus dropped.",
        (
            Query(rate("trajectories_dispatched_total"), "dispatched"),
            Query(rate("trajectories_trained_total"), "trained"),
            Query(rate("trajectories_dropped_total", "reason"), "dropped: {{reason}}"),
        ),
        unit="si:/s",
        colors={"dispatched": BLUE, "trained": GREEN},
    ),
    Panel(
        "Tokens",
        "Tokens per second, sampled and trained.",
        (Query(rate("sampled_tokens_total"), "sampled"), Query(rate("trained_tokens_total"), "trained")),
        unit="si:tok/s",
        colors={"sampled": BLUE, "trained": GREEN},
    ),
    Panel(
        "Waits by stage, p95",
        "How long trajectories wait in each stage.",
        (Query(quantile(0.95, "stage_wait_seconds", "stage"), "{{stage}}"),),
        unit="s",
    ),
    Panel(
        "Tools, p95",
        "How long calls take, and how long they wait for other calls of the same tool.",
        (
            Query(quantile(0.95, "tool_seconds", "tool"), "{{tool}}"),
            Query(quantile(0.95, "tool_wait_seconds", "tool"), "{{tool}} waits"),
        ),
        unit="s",
    ),
    Panel(
        "Length of trajectories",
        "Tokens of finished trajectories, prompt and all turns.",
        (
            Query(quantile(0.5, "trajectory_tokens"), "p50"),
            Query(quantile(0.95, "trajectory_tokens"), "p95"),
        ),
        unit="si:tok",
    ),
    Panel(
        "Retries",
        "Retried attempts and tasks per second, by reason.",
        (
            Query(rate("trajectory_retries_total"), "attempts"),
            Query(rate("task_retries_total", "reason"), "tasks: {{reason}}"),
        ),
        unit="si:/s",
    ),
    Panel(
        "Curriculum",
        "Share of each pool in the tasks that are drawn, and in those that may be.",
        (
            Query(
                f"{rate('curriculum_draws_total', 'pool')} / ignoring (pool) group_left "
                f"{rate('curriculum_draws_total')}",
                "drawn: {{pool}}",
            ),
            Query(
                f"sum by (pool) ({value('curriculum_tasks')}) / ignoring (pool) group_left "
                f"sum({value('curriculum_tasks')})",
                "tasks: {{pool}}",
            ),
        ),
        unit="percentunit",
        maximum=1.0,
    ),
    Panel(
        "How attempts end",
        "Per second: answers that pass, and attempts that do not, by kind of failure.",
        (Query(rate("attempts_total", "end"), "{{end}}"),),
        unit="si:/s",
    ),
    Panel(
        "Reward calls, p95",
        "How long each reward takes; trajectories hold their slots meanwhile.",
        (Query(quantile(0.95, "reward_seconds", "reward"), "{{reward}}"),),
        unit="s",
    ),
    Panel(
        "Failed rewards",
        "Per second: trajectories that failed in their reward for good, and retried calls.",
        (
            Query(rate("reward_errors_total", "reward", "cause"), "{{reward}}: failed, {{cause}}"),
            Query(rate("reward_retries_total", "reward"), "{{reward}}: called again"),
        ),
        unit="si:/s",
    ),
    Panel(
        "Tool calls",
        "Per second, by tool and status; errors go to the model as text.",
        (Query(rate("tool_calls_total", "tool", "status"), "{{tool}} {{status}}"),),
        unit="si:/s",
    ),
    Panel(
        "Requests over OpenAI's API",
        "Per second, by result, and parameters that are ignored.",
        (
            Query(rate("openai_requests_total", "result"), "{{result}}"),
            Query(rate("openai_ignored_total", "parameter"), "{{parameter}} ignored"),
        ),
        unit="si:/s",
    ),
    Panel(
        "On disk",
        "Finished trajectories in the spool, unfinished ones in the journal; both are bounded.",
        (Query(value("queue_bytes"), "spool"), Query(value("journal_bytes"), "journal")),
        unit="bytes",
    ),
    Panel(
        "Journal",
        "Bytes per second written for trajectories in flight, compaction included.",
        (Query(rate("journal_written_bytes_total"), "written"),),
        unit="Bps",
    ),
)

STALENESS: Final = (
    Panel(
        "Staleness of trained trajectories",
        "Trajectories by age. The bound is rollout.max_staleness.",
        (Query(increase("staleness_versions_bucket", "le"), "{{le}}"),),
        kind="heatmap",
    ),
    _of_steps(
        "staleness",
        Query(quantile(0.5, "staleness_versions"), "p50"),
        Query(quantile(0.95, "staleness_versions"), "p95"),
        Query(mean("staleness_versions"), "mean"),
        Query(value("max_staleness_versions"), "bound"),
        colors={"bound": RED},
    ),
    Panel(
        "Long answers",
        "Distance between the lengths of trained and ended trajectories, 0 unless long answers are lost; "
        "and the share of sampled tokens too old to be trained on.",
        (
            Query(value("length_ks"), "distance (KS)"),
            Query(_share(rate("masked_tokens_total"), rate("trained_tokens_total")), "masked"),
        ),
        unit="percentunit",
    ),
    Panel(
        "Partial rollouts",
        "Engine calls per second that a weight update interrupted, that resumed a turn, or that moved.",
        (
            Query(rate("interruptions_total"), "interrupted"),
            Query(rate("resumes_total"), "resumed"),
            Query(rate("failovers_total"), "failed over"),
        ),
        width=12,
        unit="si:/s",
        colors={"failed over": RED},
    ),
    Panel(
        "Restored after a restart",
        "Tokens restored from the journal at the start of this process, and those discarded.",
        (
            Query(increase("resumed_tokens_total"), "taken over"),
            Query(increase("resume_discarded_tokens_total"), "of no use"),
            Query(increase("journal_corrupt_records_total"), "damaged records"),
            Query(increase("attempts_restarted_total"), "attempts begun anew"),
            Query(increase("late_results_total"), "results of earlier owners"),
        ),
        width=12,
        colors={"damaged records": RED},
    ),
)

ENGINES: Final = (
    Panel(
        "Serving engines",
        "Green while an engine accepts requests.",
        (Query(value("engine_up"), "{{engine}}"),),
        kind="state-timeline",
        width=12,
        unit="none",
        limits=((0, RED), (1, GREEN)),
    ),
    Panel(
        "Open calls",
        "By engine, and the most that each is given; even, unless a few very long trajectories are left.",
        (
            Query(value("engine_running_requests"), "{{engine}}"),
            Query(f"{value('engine_call_limit')} > 0", "{{engine}} at most: {{reason}}"),
        ),
        width=6,
    ),
    Panel(
        "Idle and balance",
        "Share of engine time without any call; and the highest load over the mean, 1 when even.",
        (
            Query(value("engine_idle_ratio"), "idle"),
            Query(value("engine_load_imbalance"), "load over mean"),
        ),
        width=6,
        unit="none",
    ),
    Panel(
        "Failures",
        "Quarantined engines, detected stalls, and results of restarts in the window.",
        (
            Query(increase("engine_quarantined_total", "engine"), "{{engine}} quarantined"),
            Query(increase("engine_stalls_total", "kind"), "stall: {{kind}}"),
            Query(increase("engine_busy_total", "engine"), "{{engine}} refuses calls"),
            Query(increase("engine_retractions_total", "engine"), "{{engine}} retracts calls"),
            Query(increase("local_shortages_total"), "no descriptors in the driver"),
            Query(increase("engine_restarts_total", "result"), "restart: {{result}}"),
        ),
        unit="none",
    ),
    Panel(
        "First token",
        "From requesting an engine to the first token: of new trajectories, of next turns whose prefix is "
        "cached, and of calls whose prefix must be prefilled again (after an update, a failure or a move).",
        (
            Query(quantile(0.5, "first_token_seconds", "kind"), "{{kind}} p50"),
            Query(quantile(0.99, "first_token_seconds", "kind"), "{{kind}} p99"),
        ),
        unit="s",
    ),
    Panel(
        "Further models",
        "Teachers and judges: the time of an answer, and calls that failed and were made again.",
        (
            Query(quantile(0.5, "model_call_seconds", "model"), "{{model}} p50"),
            Query(quantile(0.99, "model_call_seconds", "model"), "{{model}} p99"),
            Query(increase("model_retries_total", "model"), "{{model}} calls repeated"),
            Query(increase("judge_answers_total", "reward", "result"), "{{reward}}: {{result}}"),
        ),
        unit="s",
    ),
    Panel(
        "Prefilled again",
        "Tokens per second prefilled again because of updates, failures and moves.",
        (Query(rate("prefilled_again_tokens_total", "cause"), "{{cause}}"),),
        unit="si:tok/s",
        stacked=True,
    ),
)

WEIGHTS: Final = (
    Panel(
        "Weight update by phase, mean",
        "How long the parts take by which a new version reaches the engines.",
        (
            Query(
                mean("weight_sync_seconds", "phase").replace('"$run"', '"$run",phase!="total"'), "{{phase}}"
            ),
        ),
        unit="s",
        stacked=True,
    ),
    Panel(
        "Weight update as a whole, mean",
        "From the end of the step to the last engine resumed; how much of it a step hides (weights.overlap).",
        (
            Query(mean("weight_sync_seconds").replace('"$run"', '"$run",phase="total"'), "whole"),
            Query(
                f"{rate('weight_sync_hidden_seconds_total')} / {rate('train_step_seconds_count')}",
                "hidden behind a step",
            ),
            Query(mean("hand_over_to_trainer_seconds"), "shared devices: to the trainer"),
            Query(mean("hand_over_to_engines_seconds"), "shared devices: to the engines"),
        ),
        unit="s",
    ),
    Panel(
        "Weights written or sent",
        "Bytes per second; for all engines together a version is sent once.",
        (Query(rate("weight_sync_bytes_total"), "bytes"),),
        unit="Bps",
    ),
    Panel(
        "Pause beyond the transfer",
        "Time that an update costs engines beyond the transfer; the aim is 100 ms.",
        (
            Query(quantile(0.5, "engine_pause_seconds"), "p50"),
            Query(quantile(0.99, "engine_pause_seconds"), "p99"),
            Query(rate("weight_delta_fallbacks_total", "reason"), "whole, no delta, 1/s: {{reason}}"),
        ),
        unit="s",
        limits=((0.1, YELLOW),),
    ),
    Panel(
        "Versions behind the trainer",
        "Engines: 0 or 1, unless quarantined. Checkpoint: the steps that a crash would repeat. Mismatch: how "
        "long no trained token was of the trainer's own version.",
        (
            Query(
                f"{value('trainer_weight_version')} - on (run) group_right {value('engine_weight_version')}",
                "{{engine}}",
            ),
            Query(f"{value('trainer_weight_version')} - {value('checkpoint_step')}", "newest checkpoint"),
            Query(f"{value('trainer_weight_version')} - {value('lag0_step')}", "engine mismatch"),
            Query(value("served_weights_unchanged"), "{{engine}} has old weights"),
        ),
        unit="none",
        limits=((2, RED),),
        below_zero=True,
    ),
)

ROUTING: Final = (
    Panel(
        "Rows checked",
        "Routing rows per second that reach the trainer.",
        (Query(rate("routing_rows_total"), "checked"),),
        unit="si:/s",
    ),
    Panel(
        "Missing rows",
        "Shares that the trainer has to route natively, and that were computed anew after the sampling; "
        "below 1% is healthy.",
        (
            Query(f"{rate('routing_rows_invalid_total')} / {rate('routing_rows_total')}", "invalid"),
            Query(f"{rate('routing_rows_recomputed_total')} / {rate('routing_rows_total')}", "recomputed"),
        ),
        unit="percentunit",
        limits=((0.01, RED),),
    ),
    Panel(
        "Discarded answers",
        "Answers of engines that were implausible, in the window; should stay empty. `older_weights`: the "
        "server was restarted under a call, or answered a request of an earlier epoch. "
        "`unpublished_weights`: somebody else updates the engine.",
        (Query(increase("answers_discarded_total", "reason"), "{{reason}}"),),
        unit="none",
    ),
    Panel(
        "Rejections",
        "Routing that does not match its tokens, in the window; should stay empty. The reasons are explained "
        "at Misalignment in async_rl/errors.py.",
        (
            Query(increase("replay_rejected_total", "reason"), "{{reason}}"),
            Query(increase("routing_mixed_versions_total"), "mixed versions"),
        ),
        unit="none",
    ),
    Panel(
        "Kinds of routing payloads",
        "Answers with routing per second. After an update all rows are fetched again.",
        (Query(rate("routing_payloads_total", "kind"), "{{kind}}"),),
        width=12,
        unit="si:/s",
        stacked=True,
    ),
    Panel(
        "Experts changed by an update",
        "As small as the steps; near 1 the old log-probs of interrupted turns belong to another function.",
        (
            Query(mean("routing_flip_ratio"), "mean"),
            Query(quantile(0.95, "routing_flip_ratio"), "p95"),
        ),
        width=12,
        unit="percentunit",
    ),
)

TRAINER: Final = (
    _of_steps("reward"),
    _of_steps("ppo-kl"),
    _of_steps("kl-lag"),
    _of_steps("kl-parts"),
    _of_steps(
        "log-prob-diff",
        *figure("log_prob_diff", "all tokens, signed"),
        *figure("old_log_prob_abs_diff", "trainer's two passes"),
        Query(value("restart_log_prob_abs_diff_nats"), "{{when}} the restart, {{tokens}} tokens"),
        below_zero=True,
    ),
    _of_steps("routing"),
    Panel(
        "Single tokens",
        "The largest difference of a batch. A jump without one of the means: extremes in metrics.jsonl names "
        "the token.",
        (Query(value("log_prob_diff_extreme_nats"), "largest, absolute"),),
        unit="suffix: nats",
    ),
    _of_steps("ratio", *figure("importance_ratio_mean", "mean")),
    _of_steps("ess"),
    _of_steps("clip-fraction", *figure("importance_rejected_fraction", "rejected"), unit="percentunit"),
    Panel(
        "Groups without a baseline",
        "Groups that added nothing to the loss: trainer.loss.reject left them fewer than two attempts.",
        (Query(value("groups_without_baseline"), "groups"),),
        unit="none",
    ),
    _of_steps(
        "entropy",
        *figure("reference_kl", "KL from the reference"),
        *figure("teacher_kl", "reverse KL from the teacher"),
    ),
    _of_steps("loss"),
    _of_steps("grad-norm"),
    Panel(
        "Critic: explained variance, clipped values",
        "Share of the variance of returns that values explain; near 0 a critic is no better than a constant. "
        "With trainer.loss.advantages: gae only.",
        (
            Query(value("value_explained_variance"), "explained"),
            Query(value("value_clip_fraction"), "clipped"),
        ),
        unit="percentunit",
        below_zero=True,
    ),
    Panel(
        "Critic: loss, gradient norm",
        "With trainer.loss.advantages: gae only.",
        (Query(value("value_loss"), "loss"), Query(value("critic_grad_norm"), "norm")),
        unit="none",
    ),
    Panel(
        "Learning rate",
        "Value at each step.",
        (Query(value("learning_rate"), "rate"),),
        unit="sci",
    ),
    _of_steps(
        "step-time",
        Query(value("checkpoint_pause_seconds"), "checkpoint: pause"),
        Query(value("checkpoint_write_seconds"), "checkpoint: written beside"),
        colors={"step": GREEN, "wait": GREY},
    ),
    _of_steps("plan"),
    _of_steps(
        "idle",
        Query(value("trainer_idle_ratio"), "trainer, since the start"),
        Query(_share(rate("batch_wait_seconds_sum"), rate("train_step_seconds_sum")), "trainer, lately"),
    ),
)

HEALTH: Final = (
    Panel(
        "Firing alerts",
        "docs/guide/watching.md says what to do about each.",
        (Query('ALERTS{alertstate="firing", run="$run"}', "{{alertname}}"),),
        kind="state-timeline",
        unit="none",
        limits=((1, RED),),
    ),
    Panel(
        "Time since last progress",
        "Drops to zero again and again; a rising line is a stalled run, and /health names the wait.",
        (Query(value("seconds_since_progress"), "since progress"),),
        unit="s",
        limits=((300, RED),),
    ),
    Panel(
        "Oldest wait",
        "By what is awaited; a line that only rises is the cause of a stall.",
        (Query(value("oldest_wait_seconds"), "{{awaited}}"),),
        unit="s",
    ),
    Panel(
        "Unaccounted trajectories",
        "Dispatched minus in flight, queued, trained and dropped. Not zero for longer than a scrape: "
        "a bug of ours.",
        (Query(UNACCOUNTED, "unaccounted"),),
        unit="none",
        width=6,
        limits=((1, RED),),
        below_zero=True,
    ),
    Panel(
        "Stalls and restarts",
        "Times in the window that the run stalled, that the event loop was blocked, that the trainer "
        "or a rollout worker was started again, and that a step did not reach a tracker.",
        (
            Query(increase("stalls_total", "awaited"), "stall: {{awaited}}"),
            Query(increase("event_loop_blocked_total"), "event loop blocked"),
            Query(increase("trainer_restarts_total"), "trainer restarted"),
            Query(increase("rollout_worker_restarts_total"), "rollout worker restarted"),
            Query(increase("user_processes_reaped_total", "kind", "reason"), "ended: {{kind}}, {{reason}}"),
            Query(increase("checkpoint_failures_total"), "checkpoint failed"),
            Query(increase("updates_skipped_total"), "update skipped"),
            Query(increase("tracker_steps_lost_total", "tracker"), "not in {{tracker}}"),
        ),
        unit="none",
        width=6,
    ),
    Panel(
        "Event loop lag",
        "Above a second, code that blocks runs on the driver's event loop: in a tool, a reward or an agent "
        "loop.",
        (
            Query(quantile(0.5, "event_loop_lag_seconds"), "p50"),
            Query(quantile(0.99, "event_loop_lag_seconds"), "p99"),
        ),
        unit="s",
        width=6,
        limits=((1, RED),),
    ),
    Panel(
        "Limits",
        "What is used of the disk with run.dir, of the memory where the driver runs, and of the driver's "
        "file descriptors. A full disk ends the run.",
        (
            Query(f"1 - {value('disk_free_bytes')} / {value('disk_size_bytes')}", "disk"),
            Query(f"{value('memory_used_bytes')} / {value('memory_limit_bytes')}", "memory"),
            Query(f"{value('open_descriptors')} / {value('max_descriptors')}", "descriptors"),
        ),
        unit="percentunit",
        width=6,
        maximum=1,
        limits=((0.9, RED),),
    ),
)

EVALUATION: Final = (
    _of_steps("validation-reward", Query(value("evaluation_reward"), "{{set}}")),
    _of_steps("validation-pass", Query(value("evaluation_pass_share"), "{{set}}, k = {{k}}")),
    Panel(
        "Evaluations",
        "Completed and cancelled evaluations in the window, their mean duration, dropped answers.",
        (
            Query(increase("evaluations_total", "result"), "{{result}}"),
            Query(mean("evaluation_seconds"), "seconds"),
            Query(increase("evaluation_answers_total", "result"), "answers: {{result}}"),
            Query(
                f"{value('trainer_weight_version')} - {value('evaluation_weight_version')}", "versions behind"
            ),
        ),
        unit="none",
    ),
)

ROWS: Final = {
    "Flow": FLOW,
    "Evaluation": EVALUATION,
    "Staleness": STALENESS,
    "Engines": ENGINES,
    "Weights": WEIGHTS,
    "Routing": ROUTING,
    "Trainer": TRAINER,
    "Health": HEALTH,
}
"""The rows of the dashboard, from top to bottom."""
