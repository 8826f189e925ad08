"""Every Prometheus instrument of a run, declared here and nowhere else, and the two endpoints that show them.

An attribute `x` of `Metrics` is the metric `async_rl_x`. Names end in their unit; counters end in `_total`.
What each says is its help sentence. Instruments live in a registry of their own, so that two runs in one
process (the tests) do not meet.
"""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from async_rl.errors import EnvironmentNotReady
from async_rl.records import StepRecord

PREFIX = "async_rl_"

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)
"""Waits of a loop wake-up up to a large trainer step."""
TOKENS = tuple(float(1 << n) for n in range(4, 18))
"""16 to 131072."""
SHARES = (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""None at all, then from one in a thousand to all."""
VERSIONS = tuple(float(n) for n in range(17))


class Metrics:
    """All instruments of one run.

    Example:
        >>> metrics = Metrics()
        >>> metrics.trajectories_dropped_total.labels(reason="stale").inc()
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(PREFIX + name, text, labels, registry=self.registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
            return Histogram(PREFIX + name, text, labels, buckets=buckets, registry=self.registry)

        # The policy, as of the last trainer step.
        self.reward = gauge("reward", "Mean reward of the last batch.")
        self.loss = gauge("loss", "Policy loss of the last step.")
        self.ppo_kl = gauge("ppo_kl", "Mean of old minus current log-probs over the last step, nats.")
        self.ppo_kl_bypass = gauge(
            "ppo_kl_bypass", "The same where the engines' log-probs stand for the old ones, nats."
        )
        self.rollout_kl = gauge(
            "rollout_kl",
            "Mean of rollout minus the trainer's log-probs before the last step, nats, by versions of lag.",
            "lag",
        )
        self.clip_fraction = gauge("clip_fraction", "Share of tokens whose ratio the last step clipped.")
        self.entropy_nats = gauge("entropy_nats", "Mean entropy of the policy at the trained tokens, nats.")
        self.grad_norm = gauge("grad_norm", "Gradient norm of the last step, before clipping.")
        self.importance_ratio_mean = gauge(
            "importance_ratio_mean", "Mean of exp(old - rollout) over the last batch, before truncation."
        )
        self.log_prob_diff_nats = gauge(
            "log_prob_diff_nats", "Mean of trainer minus rollout log-prob over all trained tokens, nats."
        )
        self.log_prob_abs_diff_nats = gauge(
            "log_prob_abs_diff_nats",
            "Mean absolute trainer minus rollout log-prob over all trained tokens, nats.",
        )
        self.lag0_log_prob_abs_diff_nats = gauge(
            "lag0_log_prob_abs_diff_nats",
            "The same over tokens sampled at the trainer's own version: the engines' mismatch alone.",
        )

        # Trajectories, from dispatch to settlement:
        # dispatched = in_flight + queued + trained + dropped, always.
        self.trajectories_dispatched_total = counter(
            "trajectories_dispatched_total", "Trajectories handed to an agent loop."
        )
        self.trajectories_in_flight = gauge(
            "trajectories_in_flight", "Trajectories dispatched and not yet finished with their group."
        )
        self.trajectories_queued = gauge(
            "trajectories_queued", "Trajectories of finished groups that wait for the trainer."
        )
        self.trajectories_trained_total = counter(
            "trajectories_trained_total", "Trajectories consumed by a trainer step."
        )
        self.trajectories_dropped_total = counter(
            "trajectories_dropped_total", "Trajectories that will never be trained, by reason.", "reason"
        )
        self.queue_bytes = gauge("queue_bytes", "Bytes of finished trajectories held in the spool.")
        self.trajectory_tokens = histogram(
            "trajectory_tokens", "Tokens of finished trajectories, prompt and all turns.", TOKENS
        )
        self.staleness_versions = histogram(
            "staleness_versions",
            "Trainer version minus oldest sampled version of each trained trajectory.",
            VERSIONS,
        )
        self.length_ks = gauge(
            "length_ks",
            "Kolmogorov-Smirnov distance of trained trajectories' lengths from those of all that ended.",
        )
        self.masked_tokens_total = counter(
            "masked_tokens_total",
            "Sampled tokens of trained trajectories that were too old to be trained on.",
        )
        self.stage_wait_seconds = histogram(
            "stage_wait_seconds",
            "Waiting of one piece of work in one stage (admission, engine, queue).",
            SECONDS,
            "stage",
        )
        self.trajectory_retries_total = counter(
            "trajectory_retries_total", "Attempts at trajectories after their first one failed."
        )
        self.task_retries_total = counter(
            "task_retries_total", "Times a task was given out again because its group was lost.", "reason"
        )
        self.tool_calls_total = counter("tool_calls_total", "Tool calls by status (ok, error).", "status")
        self.sampled_tokens_total = counter("sampled_tokens_total", "Tokens sampled by engines.")
        self.trained_tokens_total = counter(
            "trained_tokens_total", "Tokens the policy wrote that were trained on."
        )
        self.tokens_per_second = gauge("tokens_per_second", "Tokens sampled per second over the last step.")

        # Partial rollouts.
        self.interruptions_total = counter(
            "interruptions_total", "Engine calls cut short by a weight update."
        )
        self.resumes_total = counter("resumes_total", "Engine calls that continued an interrupted turn.")
        self.failovers_total = counter(
            "failovers_total", "Engine calls moved to another engine because theirs failed."
        )

        # Resume after a restart of this process.
        self.journal_bytes = gauge("journal_bytes", "Size of the journal of trajectories in flight.")
        self.journal_written_bytes_total = counter(
            "journal_written_bytes_total", "Bytes written to the journal, compaction included."
        )
        self.journal_corrupt_records_total = counter(
            "journal_corrupt_records_total", "Records of the journal that failed their checksum at a restart."
        )
        self.resumed_tokens_total = counter(
            "resumed_tokens_total", "Sampled tokens that were taken over from the journal after a restart."
        )
        self.resume_discarded_tokens_total = counter(
            "resume_discarded_tokens_total",
            "Sampled tokens of the journal that were not used, because an agent loop took another course.",
        )

        # Routing replay.
        self.routing_rows_total = counter("routing_rows_total", "Routing rows checked before training.")
        self.routing_rows_invalid_total = counter(
            "routing_rows_invalid_total", "Routing rows never reported, so replayed natively by the trainer."
        )
        self.replay_rejected_total = counter(
            "replay_rejected_total",
            "Times routing was rejected because it does not fit, by reason.",
            "reason",
        )
        self.routing_payloads_total = counter(
            "routing_payloads_total",
            "Answers that came with routing: of all tokens (full), of the end only (delta), for it alone "
            "(recovery).",
            "kind",
        )
        self.routing_mixed_versions_total = counter(
            "routing_mixed_versions_total",
            "Answers whose rows are of several weight versions, though updates flush the prefix cache.",
        )
        self.routing_flip_ratio = histogram(
            "routing_flip_ratio",
            "Share of the experts of an interrupted turn's tokens that the next weights replaced; a sample.",
            SHARES,
        )

        # Engines.
        self.engine_up = gauge("engine_up", "1 while an engine takes requests, else 0.", "engine")
        self.engine_weight_version = gauge(
            "engine_weight_version", "Weight version an engine was last attested at.", "engine"
        )
        self.engine_running_requests = gauge(
            "engine_running_requests", "Calls that are open on an engine.", "engine"
        )
        self.engine_quarantined_total = counter(
            "engine_quarantined_total", "Times an engine was taken out of service.", "engine"
        )
        self.engine_restarts_total = counter(
            "engine_restarts_total", "Restarts of engines by result (ok, failed).", "engine", "result"
        )
        self.engine_stalls_total = counter(
            "engine_stalls_total",
            "What an engine was found not to do: answer (unreachable), go on with any call (silent), with "
            "one of several (call), or begin one (overtaken).",
            "engine",
            "kind",
        )
        self.engine_load_imbalance = gauge(
            "engine_load_imbalance", "Highest load of a serving engine in tokens, over the mean of all."
        )
        self.first_token_seconds = histogram(
            "first_token_seconds",
            "From asking for an engine to the first token: of a new trajectory, the next call of one whose "
            "prefix is cached, or one that must be prefilled again.",
            SECONDS,
            "kind",
        )
        self.prefilled_again_tokens_total = counter(
            "prefilled_again_tokens_total",
            "Tokens whose keys and values had been computed before, by why they were lost (update, failover, "
            "moved, evicted).",
            "cause",
        )
        self.engine_idle_ratio = gauge(
            "engine_idle_ratio", "Share of engine time without any call, since the start of training."
        )
        self.engine_standstill_seconds = histogram(
            "engine_standstill_seconds",
            "Time an engine took no requests in a weight update, beyond the transfer itself.",
            SECONDS,
        )

        # Trainer and weights.
        self.trainer_weight_version = gauge("trainer_weight_version", "Weight version the trainer holds.")
        self.trainer_restarts_total = counter(
            "trainer_restarts_total", "Times the trainer was started again from its newest checkpoint."
        )
        self.weight_sync_seconds = histogram(
            "weight_sync_seconds",
            "Duration of a weight update by phase (interrupt, transfer, verify, total).",
            SECONDS,
            "phase",
        )
        self.train_step_seconds = histogram("train_step_seconds", "Duration of a trainer step.", SECONDS)
        self.batch_wait_seconds = histogram(
            "batch_wait_seconds", "Time the trainer waited for a batch before a step.", SECONDS
        )
        self.trainer_idle_ratio = gauge(
            "trainer_idle_ratio", "Share of time the trainer waited for a batch, since the start of training."
        )

        # Standing still.
        self.seconds_since_progress = gauge(
            "seconds_since_progress",
            "Seconds since a token, the end of a trajectory, a step or an engine that serves.",
        )
        self.oldest_wait_seconds = gauge(
            "oldest_wait_seconds", "Age of the oldest open wait, by what is awaited; 0 for none.", "awaited"
        )
        self.stalls_total = counter(
            "stalls_total",
            "Times the run stood still or a wait was over its limit, by what was awaited.",
            "awaited",
        )
        self.event_loop_lag_seconds = histogram(
            "event_loop_lag_seconds", "How late the event loop came to a tick of a second.", SECONDS
        )
        self.event_loop_blocked_total = counter(
            "event_loop_blocked_total", "Times the event loop stood still for `doctor.blocked_s`."
        )

    def observe_step(self, record: StepRecord) -> None:
        """Take over what a step's record says of policy, routing, tokens and times.

        Trajectory counts, engines, staleness and weight updates are reported where they happen.
        """
        for gauge, figure in (
            (self.reward, record.reward_mean),
            (self.loss, record.loss),
            (self.ppo_kl, record.ppo_kl),
            (self.ppo_kl_bypass, record.ppo_kl_bypass),
            (self.rollout_kl.labels("0"), record.rollout_kl_lag0),
            (self.rollout_kl.labels("1"), record.rollout_kl_lag1),
            (self.rollout_kl.labels("2+"), record.rollout_kl_lag2_up),
            (self.clip_fraction, record.clip_fraction),
            (self.entropy_nats, record.entropy),
            (self.grad_norm, record.grad_norm),
            (self.importance_ratio_mean, record.importance_ratio_mean),
            (self.log_prob_diff_nats, record.log_prob_diff),
            (self.log_prob_abs_diff_nats, record.log_prob_abs_diff),
            (self.lag0_log_prob_abs_diff_nats, record.lag0_log_prob_abs_diff),
            (self.length_ks, record.length_ks),
        ):
            gauge.set(math.nan if figure is None else figure)
        self.trainer_weight_version.set(record.weight_version)
        self.tokens_per_second.set(record.tokens_per_s)
        self.trained_tokens_total.inc(record.trained_tokens)
        self.masked_tokens_total.inc(record.masked_tokens)
        self.routing_rows_total.inc(record.routing_rows)
        self.routing_rows_invalid_total.inc(record.routing_rows_invalid)
        self.train_step_seconds.observe(record.step_s)
        self.batch_wait_seconds.observe(record.wait_s)


@asynccontextmanager
async def serve(
    metrics: Metrics, host: str, port: int, health: Callable[[], dict[str, Any]]
) -> AsyncIterator[str]:
    """Serve `/metrics` (Prometheus text) and `/health` (JSON) while the block runs.

    Args:
        metrics: What to show.
        host: Address to bind to.
        port: 0 takes a free one.
        health: Says how the run is; its `"status"` must be `"ok"` for an answer of 200, else it is 503.

    Yields:
        The URL that was bound, without a path.

    Raises:
        EnvironmentNotReady: The address cannot be bound.
    """

    async def show_metrics(_: web.Request) -> web.Response:
        body = generate_latest(metrics.registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    async def show_health(_: web.Request) -> web.Response:
        state = health()
        status = 200 if state.get("status") == "ok" else 503
        return web.json_response(state, status=status, dumps=lambda value: json.dumps(value, default=str))

    app = web.Application()
    app.add_routes([web.get("/metrics", show_metrics), web.get("/health", show_health)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            raise EnvironmentNotReady(
                f"cannot serve metrics on {host}:{port} ({error.strerror or error}): set metrics.port "
                f"to a free port, or to 0 for any"
            ) from error
        bound = runner.addresses[0][1]
        yield f"http://{f'[{host}]' if ':' in host else host}:{bound}"
    finally:
        await runner.cleanup()
