"""Checks after a run: those of its files by `verification/audit_run.py`, and that nothing is left behind."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from async_rl.config import Config
from async_rl.observability.records import step_record_log
from async_rl.store.ledger import REDISPATCHED
from verification.audit_run import Result, RunFiles
from verification.audit_run import audit as audit_files
from verification.chaos import reward
from verification.chaos.engine_faults import EngineFaults
from verification.chaos.evidence import LedgerWatch, Processes
from verification.chaos.exposure import Exposure
from verification.diary import Trained, read

_LARGEST_MISMATCH = 1e-4
"""Mean over a step's tokens of lag 0, nats: two programs in float32 differ by 1e-7 to 1e-6; tokens of weights
one step older by 1e-2."""


def audit(
    config: Config,
    diary: Path,
    watch: LedgerWatch,
    processes: Processes,
    exposure: Exposure,
    faults: EngineFaults,
) -> list[Result]:
    """Return all checks of a run that completed."""
    run_dir = Path(config.run.dir) / config.run.name
    every = [entry for entry in read(diary) if isinstance(entry, Trained)]
    findings = [
        *audit_files(run_dir, diary, config.rollout.max_staleness, config.run.max_steps),
        _positions(RunFiles(run_dir, diary), watch),
        _rewards(every, watch),
        _rows(faults.sent_rows(), faults.trained_rows()),
        _mismatch(config, run_dir),
    ]
    orphans = processes.left()
    findings.append(Result("no process is left", not orphans, ", ".join(orphans) or "none"))
    files = sorted(path for path in processes.shared if Path(path).exists())
    findings.append(Result("no shared memory is left", not files, ", ".join(files) or "none"))
    return findings + _private(exposure)


def _private(exposure: Exposure) -> list[Result]:
    """Check that other users had no access to anything of the run."""
    beyond, readable, leaks = map(sorted, (exposure.open_to_others, exposure.readable, exposure.leaks))
    return [
        Result(
            "everything listens on the loopback interface",
            not beyond and exposure.num_listening > 0,
            f"{exposure.num_listening} sockets looked at, beyond: {beyond}",
        ),
        Result("files are the user's alone", not readable, ", ".join(readable) or "all of them"),
        Result(
            "no key is shown",
            not leaks and len(exposure.secrets) >= 3,  # two of an engine, one of Ray
            f"{len(exposure.secrets)} keys looked for, found in: {leaks}",
        ),
    ]


def _rewards(every: list[Trained], watch: LedgerWatch) -> Result:
    """Check that no failure of the reward server was trained on as a score."""
    rewards = [each for entry in every for each in entry.rewards]
    wrong = [each for each in rewards if not reward.LEAST <= each <= reward.MOST]
    dropped = sum(row.reason == "reward_unavailable" for row in watch.rows.values())
    return Result(
        "no failure of a reward was scored",
        not wrong and len(rewards) > 0,
        f"{len(rewards)} rewards, the least {min(rewards, default=0):.3f}, outside of what the server gives: "
        f"{len(wrong)}; {dropped} attempts dropped without a reward",
    )


def _rows(sent: np.ndarray, trained: np.ndarray) -> Result:
    """Check that an engine sent each routing row that was replayed, for the same tokens up to its own."""
    unknown = len(np.setdiff1d(trained, sent, assume_unique=True))
    return Result(
        "replayed routing is what engines sent",
        not unknown and len(trained) > 0,
        f"{len(trained)} rows replayed, {len(sent)} sent, replayed but not sent: {unknown}",
    )


def _mismatch(config: Config, run_dir: Path) -> Result:
    """Check that the trainer's very weights gave the log-probs of all tokens that count as theirs."""
    records = [each for each in step_record_log(run_dir / "metrics.jsonl").read() if each.tokens_lag0]
    worst = max(records, key=lambda each: each.lag0_log_prob_abs_diff or 0.0)
    mean = worst.lag0_log_prob_abs_diff
    mixed = config.routing.merge == "splice"  # replays rows of older weights on purpose
    return Result(
        "tokens at lag 0 are of the trainer's weights",
        mixed or (mean is not None and mean <= _LARGEST_MISMATCH),
        f"{mean} nats at step {worst.step}, the most of {len(records)} steps"
        + (", with rows of older weights (routing.merge: splice)" if mixed else ""),
    )


def _positions(run: RunFiles, watch: LedgerWatch) -> Result:
    """Check that no task was skipped, by the drops that were seen: at the end only their number is known."""
    used = watch.pending | set(run.trained_positions)
    for trajectory_id, row in watch.rows.items():
        outstanding = trajectory_id in watch.current and row.state in ("in_flight", "queued")
        spent = row.state == "dropped" and row.reason not in REDISPATCHED
        if outstanding or spent:
            used.add(row.position)
    cursor = max((row.position for row in watch.rows.values()), default=-1) + 1
    skipped = sorted(set(range(cursor)) - used)
    return Result("no task was skipped", not skipped, f"{cursor} tasks, skipped: {skipped}")
