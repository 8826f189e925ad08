"""Runs the real loop as a user would, injects faults by a plan, and restarts a driver that ended of them.

The run is observed from outside only: its processes by the environment that they inherit, its progress by the
trainer's diary, its ledger by reading the file.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil

from async_rl.config import Config, parse_config
from async_rl.engines.sglang.server import free_port
from async_rl.types import root_of
from verification.audit_run import Result
from verification.chaos.audit import audit
from verification.chaos.engine_faults import FAULTS, EngineFaults, Evidence, TooBusy
from verification.chaos.evidence import LedgerWatch, Processes
from verification.chaos.exposure import Exposure
from verification.chaos.lost_journals import (
    LostJournal,
    count_left,
    journal_of,
    left_in,
    read_journals,
)
from verification.chaos.plan import Blow, Kind, last
from verification.chaos.shortages import DescriptorShortage, FullDisk, RewardServer
from verification.chaos.strikes import USED_SHARE, Strikes
from verification.diary import DIARY, Trained, read

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
STUCK_S = 400.0
"""A run without a step for this time hangs: every limit in its config is far shorter. Only a busy machine
makes a start slow."""
MAX_ENDS = 5
"""A driver that has ended by itself is started again this often, so that a run finds more than one reason."""
_FLUSHED_S = 5.0
"""After this the ledger's file has what had happened before."""
CONTINUES_S = 400.0
"""The attempts of a lost rollout worker must have continued within this time: the worker that continues them,
or the trainer, may have to be started first."""
STRIKE_S = 45.0
"""A fault that waits for a call or a reward is given up after this time."""
GONE_S = 60.0
"""Ranks, rollout workers and engines must be gone within this time after a kill of the driver."""
STARTS_S = 60.0
"""The same for others: a process that Ray has just started tries to reach its killed raylet for 25 s."""

ORPHANS_S = 60.0
"""What user code has left behind must be gone within this time after the end of the run."""


class Violation(AssertionError):
    """The run failed before the audit."""


def make_config(
    folder: Path, model: Path, data: Path, seed: int, *, num_engines: int, num_ranks: int, num_workers: int
) -> dict:
    """Return the config of a run with small limits, so that hangs are detected in seconds.

    Args:
        folder: Folder of the run's folder.
        model: The model.
        data: The tasks.
        seed: Chooses transport, interruption and merge of routing.
        num_engines: Servers.
        num_ranks: Ranks of the trainer.
        num_workers: Rollout workers; 0 runs sessions in the driver.
    """
    rng = random.Random(seed)
    interrupt, merge = rng.choice([("abort", "replace"), ("abort", "splice"), ("retract", "replace")])
    return {
        "run": {"name": "run", "dir": str(folder), "max_steps": 1_000_000, "drain_s": 60, "seed": seed},
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"path": str(data)},
        "engine": {
            "num_engines": num_engines,
            "device": "cpu",
            "max_running_requests": 8,
            "max_total_tokens": 16384,
            "context_length": 512,
            "stall_s": 30,
            "start_timeout_s": 240,  # a server that lacked descriptors while it started may never listen
            "request_timeout_s": 15,
            "max_restarts": 1000,
        },
        "rollout": {
            "agent_loop": "verification.chaos.loop:LeavingLoop",
            "agent_loop_args": {"tools": ["agent_loops.calculator:calculator"]},
            "reward": "digits",
            "rewards": {
                "digits": {
                    "kind": "http",
                    "url": f"http://127.0.0.1:{free_port('127.0.0.1')}/score",
                    "max_retries": 1,
                    "timeout_s": 5,
                }
            },
            "num_workers": num_workers,
            "worker_stall_s": 20,
            "group_size": 4,
            "max_concurrent_trajectories": 24,
            "max_staleness": 3,
            "max_context_tokens": 256,
            "max_new_tokens": 96,
        },
        "routing": {"merge": merge},
        "metrics": {"port": free_port("127.0.0.1")},
        "weights": {
            "transport": rng.choice(["disk", "distributed"]),
            "interrupt": interrupt,
            "bucket_bytes": 262144,
            "timeout_s": 40,
        },
        "trainer": {
            "worker": "verification.chaos.worker:DiaryWorker",
            "device": "cpu",
            "num_ranks": num_ranks,
            "layout": {"ep": num_ranks},
            "groups_per_batch": 3,
            "checkpoint_every": 2,
            "step_timeout_s": 20,
            "max_restarts": 1000,
            "optimizer": {"lr": 1e-3},
        },
    }


class Chaos:
    """One run, from its first start to its last step."""

    def __init__(self, folder: Path, tree: dict[str, Any], tell: Callable[[str], None]) -> None:
        """Write the config; starts nothing.

        Args:
            folder: Empty; for what the harness and the tests' own parts of the run write.
            tree: The config.
            tell: Receives each line of the timeline.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._tree = tree
        self._tell = tell
        self._begin = self._next_look = time.monotonic()
        self._config_path = folder / "chaos.yaml"
        self._output = folder / "output.txt"
        self._diary = folder / "diary.jsonl"
        self._run_dir = Path(tree["run"]["dir"]) / tree["run"]["name"]
        self._driver: subprocess.Popen[bytes] | None = None
        self._trained_before = 0  # steps that the drivers before this one have trained
        self._expected: int | None = None  # the exit code of a driver that the plan killed
        self._ends: list[str] = []  # of drivers that ended by themselves
        self._excuse: Kind | None = None  # a fault that may end the driver with a message about the disk
        self._reward = RewardServer(tree["rollout"]["rewards"]["digits"]["url"])
        self._disk = FullDisk(Path(tree["run"]["dir"]))
        self._faults = EngineFaults(folder / "faults")
        self.strikes = Strikes()
        self.processes = Processes(self._diary)
        self.ledger = LedgerWatch(self._run_dir / "ledger.sqlite")
        self.exposure = Exposure()

    def run(
        self, plan: Iterable[Blow], seed: int, more_steps: int = 3, required: Iterable[Kind] = ()
    ) -> list[Result]:
        """Start the run, execute the plan, kill the driver, let the run complete, and audit it.

        Args:
            plan: The faults.
            seed: Chooses the moment of the last fault.
            more_steps: Steps after the last fault.
            required: Faults that must take effect, beside those of the plan.

        Raises:
            Violation: When the driver exits by itself, or the run hangs.
        """
        try:
            self._reward.start()
            self.start()
            self._wait_for_step("start")
            for blow in plan:
                self.strike(blow)
            final = last(seed)
            self.strike(final, start_again=False)
            self._tree["run"]["max_steps"] = self._steps() + more_steps
            self._note(f"the last start is to reach step {self._steps() + more_steps}")
            self.start()
            self._until(lambda: self._ended() is not None, STUCK_S, "the end of the run")
            if self._ended() != 0:
                raise Violation(f"the driver ended with code {self._ended()}: {self._end_of_log()}")
            self._note("the run has ended")
            self._until(lambda: not self.processes.left(), ORPHANS_S, "", must=False)
            self._look()
            findings = audit(
                self.config, self._diary, self.ledger, self.processes, self.exposure, self._faults
            )
            by_itself = Result(
                "the driver never ended by itself", not self._ends, "; ".join(self._ends) or "never"
            )
            return [*findings, by_itself, self.strikes.finding(required), self.strikes.journals()]
        finally:
            self._clean_up()

    @property
    def config(self) -> Config:
        """As it is now."""
        return parse_config(json.loads(json.dumps(self._tree)))

    def start(self) -> None:
        """Start the driver, with the same command each time."""
        self._trained_before = self._num_trained()
        self._config_path.write_text(json.dumps(self._tree, indent=1))  # JSON is YAML
        with self._output.open("ab") as output:
            self._driver = subprocess.Popen(
                [sys.executable, "-m", "async_rl.cli", "train", str(self._config_path)],
                cwd=ROOT,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self._expected = None
        self._note(f"driver {self._driver.pid} is started")

    def _environment(self) -> dict[str, str]:
        paths = [str(ROOT / "verification/chaos/hooks"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        return os.environ | {
            DIARY: str(self._diary),
            FAULTS: str(self._faults.folder),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }

    def strike(self, blow: Blow, *, start_again: bool = True) -> None:
        """Wait for the moment of a blow, execute it, and observe the result."""
        if blow.after_step:
            self._wait_for_step("a step before the next blow")
        self._wait(blow.delay_s)
        self.strikes.plan(blow.kind)
        faults = {
            "stuck_payload": self._stick_payload,
            "too_busy": self._make_busy,
            "no_descriptors": self._take_descriptors,
            "disk_full": self._fill_disk,
            "delay_worker": self._delay_worker,
        }
        if fault := faults.get(blow.how):
            fault(blow)
        elif blow.victim == "reward server":
            self._end_reward_server(blow)
        elif blow.victim == "rollout worker":
            self._end_worker(blow)
        else:
            self._signal(blow, start_again=start_again)

    def _pick_victim(self, blow: Blow) -> psutil.Process | None:
        def candidates() -> list[psutil.Process]:
            # Those that an earlier signal has stopped are yet to be ended by the run.
            running = self.processes.look().get(blow.victim, [])
            found = [each for each in running if _is_alive(each, psutil.STATUS_STOPPED)]
            return sorted(found, key=lambda process: process.pid)

        if (victim := self._pick(blow, candidates)) is None:
            return None
        self._note(f"{blow.how} to {blow.victim} {victim.pid} ({victim.name()}), after step {self._steps()}")
        return victim

    def _send_signal(self, blow: Blow, victim: psutil.Process) -> None:
        try:
            victim.send_signal(getattr(signal, blow.how))
            self.strikes.strike(blow.kind)
        except psutil.NoSuchProcess:
            self._note("it was gone already")

    def _signal(self, blow: Blow, *, start_again: bool) -> None:
        if (victim := self._pick_victim(blow)) is None:
            return
        if blow.victim == "driver" and blow.how == "SIGKILL":
            self._expected = -signal.SIGKILL
            before = self.processes.look()
            victim.send_signal(signal.SIGKILL)
            self.strikes.strike(blow.kind)
            self._until(lambda: self._ended() is not None, 10, "the driver's end")
            if start_again:
                self.start()
            self._wait_until_gone(before)
        elif blow.victim == "driver":
            victim.send_signal(signal.SIGSTOP)
            self.strikes.strike(blow.kind)
            self._wait(blow.lasts_s)
            victim.send_signal(signal.SIGCONT)
            self._note(f"driver {victim.pid} continues after {blow.lasts_s:.1f} s")
        else:
            self._send_signal(blow, victim)

    def _end_worker(self, blow: Blow) -> None:
        """Signals a rollout worker, and finds out what its journal had and what others used of it."""
        if (victim := self._pick_victim(blow)) is None:
            return
        names = "resumed_tokens_total", "resume_discarded_tokens_total"
        before, used, restarts = self._counted(*names), 0, self._counted("rollout_worker_restarts_total")
        folder = journal_of(victim)
        self._send_signal(blow, victim)
        journals = read_journals(self._run_dir / "journal")
        left = {} if folder is None else left_in(folder, journals)
        # Until the driver has all that it sent, and the ledger knows which of its attempts had ended.
        self._until(
            lambda: self._counted("rollout_worker_restarts_total") > restarts,
            STRIKE_S,
            "the loss of a worker",
            must=False,
        )
        self._wait(_FLUSHED_S)
        self.ledger.look()
        unfinished = self.ledger.unfinished

        def num_left() -> int:
            dropped = self.ledger.dropped
            return count_left(left, {name: unfinished[name] for name in unfinished.keys() - dropped})

        def is_used() -> bool:
            nonlocal used
            used = max(used, self._counted(*names) - before)
            return used >= USED_SHARE * num_left()

        self._until(is_used, CONTINUES_S, "the attempts of a lost worker", must=False)
        self._wait(2.0)  # not all of them continue at once
        is_used()
        self.ledger.look()
        lost = LostJournal(num_left(), used)
        self._note(f"of its journal: {lost}")
        if used < USED_SHARE * lost.num_left:
            for name, state in left.items():
                self._note(
                    f"  {name}, attempt {state.attempt}: {state.num_sampled_tokens} tokens, "
                    f"attempt {unfinished.get(root_of(name))} was unfinished then"
                )
        self.strikes.lose_journal(blow.kind, lost)

    def _delay_worker(self, blow: Blow) -> None:
        """Stop a rollout worker for less than `rollout.worker_stall_s`: it continues with its leases."""
        if (victim := self._pick_victim(blow)) is None:
            return
        lasts_s = min(blow.lasts_s, 0.75 * self.config.rollout.worker_stall_s)
        try:
            victim.send_signal(signal.SIGSTOP)
            self._wait(lasts_s)
            victim.send_signal(signal.SIGCONT)
        except psutil.NoSuchProcess:
            self._note("it was gone already")
            return
        self._note(f"rollout worker {victim.pid} continues after {lasts_s:.1f} s")
        self.strikes.strike(blow.kind, {"seconds": round(lasts_s)})

    def _counted(self, *names: str) -> int:
        """Return the sum of some counters of the driver's metrics; 0 while it does not answer."""
        url = f"http://127.0.0.1:{self._tree['metrics']['port']}/metrics"
        with suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
            wanted = tuple(f"async_rl_{name}{end}" for name in names for end in " {")
            lines = answer.read().decode().splitlines()
            return sum(int(float(line.rpartition(" ")[2])) for line in lines if line.startswith(wanted))
        return 0

    def _stick_payload(self, blow: Blow) -> None:
        """Stop an engine when it has sent the first half of a routing payload."""
        if (pid := self._pick_server(blow)) is None:
            return
        before = len(self._struck("stuck_payload", pid))
        self._faults.request("stuck_payload", pid)
        self._note(f"engine {pid} is to be stopped in the middle of its next routing payload")
        # Engines are idle while a trainer starts, so as long as a step may take.
        self._until(
            lambda: len(self._struck("stuck_payload", pid)) > before or not psutil.pid_exists(pid),
            STUCK_S,
            "a payload",
            must=False,
        )
        self._faults.withdraw("stuck_payload", pid)
        if len(struck := self._struck("stuck_payload", pid)) == before:
            self._note("it sent no payload in time")
            return
        sent, left = struck[-1].bytes_sent, struck[-1].bytes_left
        self._note(f"engine {pid} is stopped after {sent} bytes of a payload, {left} are left")
        self.strikes.strike(blow.kind, {"stopped with a payload half sent": 1})
        if blow.resumes:
            self._wait(blow.lasts_s)
            resumed = _resume_tree(pid)
            self._note(f"{resumed} processes of engine {pid} are resumed after {blow.lasts_s:.1f} s")
            self.strikes.add_evidence(blow.kind, {"resumed": int(resumed > 0)})
        else:
            self._until(lambda: not psutil.pid_exists(pid), STUCK_S, "the end of an engine that is stopped")
            self._note(f"engine {pid} was replaced")
            self.strikes.add_evidence(blow.kind, {"replaced by the run": 1})

    def _make_busy(self, blow: Blow) -> None:
        """Let an engine answer 429 to all calls and control requests until it has refused one, or longer."""
        if (pid := self._pick_server(blow)) is None:
            return
        before, end = len(self._struck("too_busy", pid)), time.monotonic() + blow.lasts_s
        self._faults.request("too_busy", pid, msgspec.json.encode(TooBusy(time.time() + STRIKE_S)))
        self._note(f"engine {pid} answers 429")
        self._until(
            lambda: time.monotonic() >= end and len(self._struck("too_busy", pid)) > before,
            STRIKE_S,
            "a refused request",
            must=False,
        )
        self._faults.withdraw("too_busy", pid)
        refused = len(self._struck("too_busy", pid)) - before
        self._note(f"engine {pid} has refused {refused} requests and accepts them again")
        if refused:
            self.strikes.strike(blow.kind, {"requests answered 429": refused})

    def _take_descriptors(self, blow: Blow) -> None:
        """Leave a process without a free file descriptor for some seconds."""
        pid = self._pick_server(blow) if blow.victim == "engine" else self._driver and self._driver.pid
        if pid is None:
            return
        try:
            shortage = DescriptorShortage(pid)
        except ProcessLookupError:
            self._note(f"{blow.victim} {pid} was gone already")
            return
        self._note(f"{blow.victim} {pid} has no free file descriptors")
        try:
            num_full = self._count(shortage.tighten, blow.lasts_s)
        finally:
            shortage.end()
        self._note(
            f"{blow.victim} {pid} has them back after {blow.lasts_s:.1f} s, {num_full} samples without"
        )
        if num_full:
            self.strikes.strike(blow.kind, {"samples without a free descriptor": num_full})

    def _fill_disk(self, blow: Blow) -> None:
        """Fill the run's disk for some seconds; a driver that ends of it is started again."""
        self._excuse = blow.kind
        self._note("the disk is full")
        num_full = self._count(self._disk.fill, blow.lasts_s)
        self._disk.free()
        self._note(f"the disk has space again after {blow.lasts_s:.1f} s")
        if num_full:
            self.strikes.strike(blow.kind, {"samples without a free block": num_full})
        self._wait_for_step("after the disk was full")
        self._wait_for_step("after the disk was full")
        self._excuse = None

    def _end_reward_server(self, blow: Blow) -> None:
        """Kills the reward server, and starts it again when calls of it have failed."""
        before, end = self._counted("reward_retries_total"), time.monotonic() + blow.lasts_s
        self._reward.kill()
        self._note("the reward server is killed")
        failed = 0

        def noticed() -> bool:
            nonlocal failed
            failed = max(failed, self._counted("reward_retries_total") - before)
            return time.monotonic() >= end and failed > 0

        self._until(noticed, STRIKE_S, "a failed reward", must=False)
        self._reward.start()
        self._note(f"the reward server is started again after {failed} failed calls")
        if failed:
            self.strikes.strike(blow.kind, {"calls failed and made again": failed})

    def _pick_server(self, blow: Blow) -> int | None:
        return self._pick(blow, self._faults.servers)

    def _pick(self, blow: Blow, candidates: Callable[[], list[T]]) -> T | None:
        # On a busy machine it may take long to start again after the blow before. An engine that dies while
        # the run starts ends it.
        self._until(
            lambda: (
                bool(candidates()) and (blow.victim == "driver" or self._num_trained() > self._trained_before)
            ),
            STUCK_S,
            f"a {blow.victim} to strike",
            must=False,
        )
        if found := candidates():
            return found[int(blow.pick * len(found))]
        self._note(f"no {blow.victim} to strike: it is being started")
        return None

    def _struck(self, fault: str, pid: int) -> list[Evidence]:
        return [each for each in self._faults.evidence() if each.fault == fault and each.pid == pid]

    # -- waiting ---------------------------------------------------------------------------------------

    def _wait_for_step(self, what: str) -> None:
        port = self._tree["metrics"]["port"]
        before, begin = self._num_trained(), time.monotonic()
        self._until(lambda: self._num_trained() > before, STUCK_S, f"a step ({what})")
        self._note(f"step {self._steps()} is done, {time.monotonic() - begin:.1f} s later")
        self.exposure.look(self.processes, self._run_dir, self._output, port)

    def _wait_until_gone(self, before: dict[str, list[psutil.Process]]) -> None:
        begin = time.monotonic()
        for role, processes in sorted(before.items(), key=lambda item: item[0] == "other"):
            limit_s = STARTS_S if role == "other" else GONE_S
            self._until(lambda left=processes: not any(map(_is_alive, left)), limit_s, "", must=False)
            if left := [str(process) for process in processes if _is_alive(process)]:
                raise Violation(f"{role}: {left} still live {limit_s:.0f} s after the driver's end")
        count = sum(map(len, before.values()))
        self._note(f"its {count} processes were gone within {time.monotonic() - begin:.1f} s")

    def _wait(self, seconds: float) -> None:
        self._until(lambda: False, seconds, "", must=False)

    def _count(self, holds: Callable[[], bool], seconds: float) -> int:
        """Samples a condition for some time; returns how often it held."""
        number, end = 0, time.monotonic() + seconds
        while time.monotonic() < end:
            number += holds()
            self._wait(0.2)
        return number

    def _until(self, happened: Callable[[], bool], limit_s: float, what: str, *, must: bool = True) -> None:
        """Polls a condition, because files and other processes raise no event."""
        deadline = time.monotonic() + limit_s
        while not happened():
            if self._ended() not in (None, self._expected, 0):
                self._start_after_end()
            if time.monotonic() >= deadline:
                if must:
                    raise Violation(f"waited {limit_s:.0f} s for {what}; {self._end_of_log()}")
                return
            if time.monotonic() >= self._next_look:
                self._look()
            time.sleep(0.2)

    def _start_after_end(self) -> None:
        """Start a driver again that ended by itself: a violation, unless a full disk is the reason it gives.

        Raises:
            Violation: When this happened too often.
        """
        lines = [line for line in self._output.read_text(errors="replace").splitlines() if line.strip()]
        end = f"the driver ended with code {self._ended()}: {lines[-1]}"
        self._note(end)
        if self._excuse is not None and self._ended() == 1 and "disk" in lines[-1]:
            self.strikes.add_evidence(self._excuse, {"ends of the driver, started again": 1})
            self._disk.free()
        else:
            self._ends.append(f"{end}, at {time.monotonic() - self._begin:.0f} s")
            log = self._run_dir / "logs" / "driver.log"
            shutil.copy(log, self._output.with_name(f"driver-{len(self._ends)}.log"))
        if len(self._ends) > MAX_ENDS:
            raise Violation("\n".join(self._ends))
        self.start()

    # -- observation ----------------------------------------------------------------------------------

    def _look(self) -> None:
        """Expensive on few cores, so not in each iteration; rows of the ledger are compacted more slowly."""
        self.processes.look()
        self.ledger.look()
        self._next_look = time.monotonic() + 2.0

    def _ended(self) -> int | None:
        return self._driver.poll() if self._driver is not None else None

    def _num_trained(self) -> int:
        return sum(isinstance(entry, Trained) for entry in read(self._diary))

    def _steps(self) -> int:
        """The last completed step."""
        return next((entry.step for entry in reversed(read(self._diary))), 0)

    def _end_of_log(self) -> str:
        log = self._run_dir / "logs" / "driver.log"
        tails = [path.read_text(errors="replace")[-1500:] for path in (self._output, log) if path.exists()]
        return "\n---\n".join(tails)

    def _note(self, text: str) -> None:
        self._tell(f"{time.monotonic() - self._begin:7.1f} s  {text}")

    def _clean_up(self) -> None:
        """Remove everything of the run from this machine, also after a failure."""
        self._reward.kill()
        self._disk.free()
        if self._driver is not None and self._driver.poll() is None:
            self._driver.kill()
            self._driver.wait()
        for role in self.processes.look().values():
            for process in role:
                with suppress(psutil.NoSuchProcess):
                    process.kill()


def _resume_tree(pid: int) -> int:
    """Resumes the processes of an engine, the server's own last; returns their number."""
    resumed = 0
    with suppress(psutil.NoSuchProcess):
        server = psutil.Process(pid)
        for process in [*server.children(recursive=True), server]:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)
                resumed += 1
    return resumed


def _is_alive(process: psutil.Process, *dead: str) -> bool:
    """Whether a process continues, and has none of these states either."""
    try:
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, *dead)
    except psutil.NoSuchProcess:
        return False
