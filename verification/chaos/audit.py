"""Checks after a run: the ledger agrees with the trainer's diary, and nothing is left behind."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import numpy as np

from async_rl.config import Config
from async_rl.observability.records import Summary, step_record_log
from async_rl.queue.ledger import REDISPATCHED, Ledger
from verification.chaos import reward
from verification.chaos.diary import Trained, effective, read
from verification.chaos.engine_faults import EngineFaults
from verification.chaos.evidence import LedgerWatch, Processes
from verification.chaos.exposure import Exposure

_LARGEST_MISMATCH = 1e-4
"""Mean over a step's tokens of lag 0, nats: two programs in float32 differ by 1e-7 to 1e-6; tokens of weights
one step older by 1e-2."""


class Finding(msgspec.Struct, frozen=True):
    """The result of one check."""

    check: str
    holds: bool
    detail: str


def audit(
    config: Config,
    diary: Path,
    watch: LedgerWatch,
    processes: Processes,
    exposure: Exposure,
    faults: EngineFaults,
) -> list[Finding]:
    """Returns all checks of a run that completed."""
    run_dir = Path(config.run.dir) / config.run.name
    entries = read(diary)
    done = effective(entries)
    every = [entry for entry in entries if isinstance(entry, Trained)]
    findings = [
        _steps(config, run_dir, done),
        _trained_once(done),
        _staleness(config, every),
        *_ledger(run_dir, done, watch),
        _positions(done, watch),
        _rewards(every, watch),
        _rows(faults.sent_rows(), faults.trained_rows()),
        _mismatch(config, run_dir),
    ]
    orphans = processes.left()
    findings.append(Finding("no process is left", not orphans, ", ".join(orphans) or "none"))
    files = sorted(path for path in processes.shared if Path(path).exists())
    findings.append(Finding("no shared memory is left", not files, ", ".join(files) or "none"))
    return findings + _private(exposure)


def _private(exposure: Exposure) -> list[Finding]:
    """Checks that other users had no access to anything of the run."""
    beyond, readable, leaks = map(sorted, (exposure.open_to_others, exposure.readable, exposure.leaks))
    return [
        Finding(
            "everything listens on the loopback interface",
            not beyond and exposure.num_listening > 0,
            f"{exposure.num_listening} sockets looked at, beyond: {beyond}",
        ),
        Finding("files are the user's alone", not readable, ", ".join(readable) or "all of them"),
        Finding(
            "no key is shown",
            not leaks and len(exposure.secrets) >= 3,  # two of an engine, one of Ray
            f"{len(exposure.secrets)} keys looked for, found in: {leaks}",
        ),
    ]


def _steps(config: Config, run_dir: Path, done: dict[int, Trained]) -> Finding:
    wanted = list(range(1, config.run.max_steps + 1))
    recorded = [record.step for record in step_record_log(run_dir / "metrics.jsonl").read()]
    return Finding(
        "the run reached its steps, each done once",
        list(done) == wanted == recorded,
        f"{len(done)} of {config.run.max_steps} in the diary, {len(recorded)} in metrics.jsonl",
    )


def _trained_once(done: dict[int, Trained]) -> Finding:
    counted = Counter(i for step in done.values() for i in step.trajectory_ids)
    twice = [i for i, times in counted.items() if times > 1]
    return Finding("no trajectory was trained twice", not twice, f"{len(counted)} trained, twice: {twice}")


def _staleness(config: Config, every: list[Trained]) -> Finding:
    worst = max(entry.version - oldest for entry in every for oldest in entry.oldest)
    bound = config.rollout.max_staleness
    return Finding("the staleness bound held", worst <= bound, f"at most {worst} of {bound} versions")


def _rewards(every: list[Trained], watch: LedgerWatch) -> Finding:
    """Checks that no failure of the reward server was trained on as a score."""
    rewards = [each for entry in every for each in entry.rewards]
    wrong = [each for each in rewards if not reward.LEAST <= each <= reward.MOST]
    dropped = sum(row.reason == "reward_unavailable" for row in watch.rows.values())
    return Finding(
        "no failure of a reward was scored",
        not wrong and len(rewards) > 0,
        f"{len(rewards)} rewards, the least {min(rewards, default=0):.3f}, outside of what the server gives: "
        f"{len(wrong)}; {dropped} attempts dropped without a reward",
    )


def _rows(sent: np.ndarray, trained: np.ndarray) -> Finding:
    """Checks that an engine sent each routing row that was replayed, for the same tokens up to its own."""
    unknown = len(np.setdiff1d(trained, sent, assume_unique=True))
    return Finding(
        "replayed routing is what engines sent",
        not unknown and len(trained) > 0,
        f"{len(trained)} rows replayed, {len(sent)} sent, replayed but not sent: {unknown}",
    )


def _mismatch(config: Config, run_dir: Path) -> Finding:
    """Checks that the trainer's very weights gave the log-probs of all tokens that count as theirs."""
    records = [each for each in step_record_log(run_dir / "metrics.jsonl").read() if each.tokens_lag0]
    worst = max(records, key=lambda each: each.lag0_log_prob_abs_diff or 0.0)
    mean = worst.lag0_log_prob_abs_diff
    mixed = config.routing.merge == "splice"  # replays rows of older weights on purpose
    return Finding(
        "tokens at lag 0 are of the trainer's weights",
        mixed or (mean is not None and mean <= _LARGEST_MISMATCH),
        f"{mean} nats at step {worst.step}, the most of {len(records)} steps"
        + (", with rows of older weights (routing.merge: splice)" if mixed else ""),
    )


def _ledger(run_dir: Path, done: dict[int, Trained], watch: LedgerWatch) -> list[Finding]:
    ledger = Ledger(run_dir / "ledger.sqlite")
    counts = ledger.audit()  # raises when its counts and its tables differ
    ledger.close()
    summary = msgspec.json.decode((run_dir / "summary.json").read_bytes(), type=Summary)
    step_of = {i: step for step, entry in done.items() for i in entry.trajectory_ids}
    rows = {i: watch.rows[i] for i in watch.current}
    wrong = [i for i, row in rows.items() if (row.state == "trained") != (i in step_of)]
    wrong += [i for i, row in rows.items() if row.state == "trained" and row.step != step_of.get(i)]
    outstanding = counts.in_flight + counts.queued
    return [
        Finding(
            "the ledger accounts for every trajectory",
            counts.holds and summary.trajectories.unaccounted == 0,
            f"{counts.dispatched} dispatched = {counts.trained} trained + {outstanding} outstanding + "
            f"{counts.dropped} dropped",
        ),
        Finding(
            "the ledger and the trainer's diary agree",
            counts.trained == len(step_of) and not wrong,
            f"{counts.trained} and {len(step_of)} trained, disagreeing rows: {wrong}",
        ),
    ]


def _positions(done: dict[int, Trained], watch: LedgerWatch) -> Finding:
    """Checks that each task has exactly one outcome or is still outstanding: none skipped, none repeated."""
    trained: Counter[int] = Counter()
    for entry in done.values():
        trained.update({watch.rows[i].position for i in entry.trajectory_ids if i in watch.rows})
    used = set(trained) | watch.pending
    for trajectory_id, row in watch.rows.items():
        outstanding = trajectory_id in watch.current and row.state in ("in_flight", "queued")
        spent = row.state == "dropped" and row.reason not in REDISPATCHED
        if outstanding or spent:
            used.add(row.position)
    cursor = max((row.position for row in watch.rows.values()), default=-1) + 1
    skipped = sorted(set(range(cursor)) - used)
    repeated = sorted(position for position, times in trained.items() if times > 1)
    return Finding(
        "no task was skipped or repeated",
        not skipped and not repeated,
        f"{cursor} tasks, skipped: {skipped}, repeated: {repeated}",
    )
