"""Writes the folder of a finished run with plausible figures and one hostile name."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import yaml

from async_rl.observability.records import StepRecord, step_record_log
from async_rl.trainer_protocol import Extreme

HOSTILE = "<img src=x onerror=\"document.title='broken in'\"><script>document.title='broken in'</script>"
"""A name with markup, as a dataset, a tool or an engine may send it."""

MAX_STALENESS = 4


def records(number: int = 120, seed: int = 7) -> list[StepRecord]:
    """Return the steps of a run that learns; after two thirds, one engine is lost for a while."""
    draw = random.Random(seed)
    made: list[StepRecord] = []
    time_s, dropped = 0.0, {"stale": 0, "agent_loop_error": 0, HOSTILE: 0}
    for step in range(1, number + 1):
        share = step / number
        lost = 0.62 < share < 0.7
        counts = [draw.randint(16, 24), draw.randint(18, 26), draw.randint(6, 12), draw.randint(0, 5), 0]
        if lost:
            counts[3:] = [draw.randint(5, 9), draw.randint(1, 4)]
        total = sum(counts)
        wait_s, step_s, sync_s = draw.uniform(0.4, 1.6) + 2 * lost, draw.uniform(5, 6), draw.uniform(0.5, 0.8)
        time_s += wait_s + step_s + sync_s
        dropped = {
            "stale": dropped["stale"] + (4 if lost and step % 2 else 0),
            "agent_loop_error": dropped["agent_loop_error"] + (step % 9 == 0),
            HOSTILE: dropped[HOSTILE] + (step % 40 == 0),
        }
        mismatch = 2e-4 * draw.uniform(0.8, 1.2)
        length = 320 + 260 * share + draw.uniform(-25, 25)
        made.append(
            StepRecord(
                step=step,
                weight_version=step,
                time_s=time_s,
                reward_mean=0.12 + 0.72 / (1 + math.exp(-8 * (share - 0.45))) + draw.uniform(-0.05, 0.05),
                loss=draw.gauss(0, 0.02),
                ppo_kl=1.2e-3 * draw.uniform(0.6, 1.4) * (5 if step == number * 3 // 4 else 1),
                old_log_prob_abs_diff=0.0,
                rollout_kl_lag0=mismatch * 0.3,
                rollout_kl_lag1=1.1e-3 * draw.uniform(0.8, 1.2),
                rollout_kl_lag2_up=2.4e-3 * draw.uniform(0.7, 1.3) if step > 3 else None,
                kl_mismatch=mismatch,
                kl_staleness=8e-4 * draw.uniform(0.8, 1.2) * (2.2 if lost else 1),
                kl_routing=1.4e-4 * draw.uniform(0.8, 1.2) if step % 10 == 0 else None,
                routing_native_abs_diff=0.021 * draw.uniform(0.9, 1.1) if step % 10 == 0 else None,
                routing_replayed_abs_diff=0.008 * draw.uniform(0.9, 1.1) if step % 10 == 0 else None,
                clip_fraction=0.04 * draw.uniform(0.5, 1.5),
                entropy=0.9 * math.exp(-1.1 * share) * draw.uniform(0.96, 1.04),
                grad_norm=0.5 * draw.uniform(0.7, 1.4),
                importance_ratio_p1=0.86 - 0.04 * draw.random(),
                importance_ratio_p50=1.0 + 0.002 * draw.gauss(0, 1),
                importance_ratio_p99=1.15 + 0.05 * draw.random(),
                importance_ratio_p999=1.4 + 0.3 * draw.random(),
                effective_sample_share=0.93 - 0.08 * lost + 0.02 * draw.random(),
                extremes=(
                    Extreme(
                        trajectory_id=f"{step:04x}{draw.getrandbits(96):024x}",
                        position=draw.randint(60, 900),
                        token_id=draw.randint(0, 150_000),
                        lag=2,
                        rollout_log_prob=-0.31,
                        log_prob=-4.07,
                    ),
                ),
                lag0_log_prob_abs_diff=0.008 * draw.uniform(0.9, 1.1),
                log_prob_abs_diff=0.017 * draw.uniform(0.9, 1.1),
                staleness_mean=sum(i * n for i, n in enumerate(counts)) / total,
                staleness_p50=1.0,
                staleness_p95=3.0 if lost else 2.0,
                staleness_max=max(i for i, n in enumerate(counts) if n),
                staleness_counts=tuple(counts),
                length_ks=0.02 * draw.uniform(0.5, 1.5),
                trajectories=total,
                interrupted=total // 4,
                tokens=int(total * (length + 90)),
                sampled_tokens_mean=length,
                sampled_tokens_min=int(length * 0.2),
                sampled_tokens_max=min(2048, int(length * 3.1)),
                trained_tokens=int(total * length),
                routing_rows=int(total * length),
                wait_s=wait_s,
                step_s=step_s,
                sync_s=sync_s,
                handover_s=sync_s,
                sync_parts={
                    "interrupt": 0.05 * sync_s,
                    "gather": 0.3 * sync_s,
                    "send": 0.35 * sync_s,
                    "load": 0.25 * sync_s,
                    "verify": 0.05 * sync_s,
                },
                sync_bytes=1_220_000_000,
                pause_s=0.06 * draw.uniform(0.7, 1.6),
                in_flight=96 - 30 * lost + draw.randint(-6, 6),
                queued=40 - 22 * lost + draw.randint(-8, 8),
                dropped=sum(dropped.values()),
                dropped_reasons={reason: count for reason, count in dropped.items() if count},
                engine_idle_share=0.05 + 0.04 * share,
                tokens_per_s=11_800 * draw.uniform(0.94, 1.06) * (0.68 if lost else 1),
            )
        )
    return made


def write_run_folder(folder: Path, steps: list[StepRecord], *, max_steps: int = 120, log: str = "") -> Path:
    """Write config, steps and log of a run; the config holds a secret key."""
    (folder / "logs").mkdir(parents=True)
    (folder / ".lock").touch()
    tree = {
        "model": {"path": "models/moe-30b"},
        "data": {"path": "data/tasks.jsonl"},
        "run": {"name": "calculator-moe", "max_steps": max_steps},
        "rollout": {
            "group_size": 8,
            "max_staleness": MAX_STALENESS,
            "agent_loop_args": {"search_api_key": "sk-do-not-show", "url": "https://me:pw-do-not-show@host/"},
        },
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    (folder / "versions.json").write_text(json.dumps({"python": "3.11.9", "sglang": "0.5.23"}))
    (folder / "logs" / "driver.log").write_text(log)
    for record in steps:
        step_record_log(folder / "metrics.jsonl").append(record)
    return folder


LOG = f"""\
2026-11-21 11:36:23,461 INFO    async_rl.run.run_log: bringing engines to the trainer's weights
2026-11-21 11:36:23,479 INFO    async_rl.run.run_log: training
2026-11-21 11:36:24,100 INFO    async_rl.store.ledger: a detail of no interest
2026-11-21 11:41:02,117 WARNING async_rl.engines.pool: engine engine-1 is quarantined at version 75: silent
2026-11-21 11:41:02,118 WARNING async_rl.rollout.manager: task {HOSTILE}, attempt 1: it raised
2026-11-21 11:42:12,500 INFO    async_rl.engines.repair: engine engine-1 serves again
"""
"""The log of a driver of such a run."""

FAILURE = """\
2026-11-21 11:52:30,007 ERROR   async_rl.run.folder: the run failed: trainer failed: the GPU fell off the bus
Traceback (most recent call last):
  | somewhere deep
"""
