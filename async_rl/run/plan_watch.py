"""Compares a run with what a simulation expects of it, and says why it is slower.

```
 steps ─► `PlanWatch` ─ rarely ─► async_rl.cli.expectation, a process of its own ─► plan/record.json: a window
              │                        │ expected tokens/s, causes                  of the run, kept
              ▼                        ▼
   trained tokens/s of the last steps / expected ─► `StepRecord.throughput_vs_plan_ratio`, `below_plan`
```

The window is taken once, after the first steps; another number of engines is simulated from the same window.
A restart keeps it, unless settings have changed. A program that fails costs a line in the log.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import os
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from async_rl.config import Config
from async_rl.observability.records import NEARLY_PLAN, WINDOW, Figure, StepRecord, seconds_left
from async_rl.runtime.files import replace_file
from async_rl.runtime.threads import call_in_thread
from async_rl.runtime.waits import waiting

log = logging.getLogger(__name__)

FOLDER: Final = "plan"
RECORD: Final = Path(FOLDER, "record.json")
"""The window of the run by which later rates and causes are found, below the run's folder."""

_EXPECTED: Final = "expected.json"

WINDOW_STEPS: Final = 15
AFTER_STEPS: Final = 20
"""Steps after which the window is taken: the first 5 fill queue and engines."""

_WORTH_S: Final = 1800.0
"""A run that ends sooner than this is not compared: a fit would cost it more than a comparison brings."""

_CAUSE_EVERY_S: Final = 900.0
"""Seconds between two looks for the cause while the run stays below its plan."""

_LIMIT_S: Final = 1200.0
"""Seconds for an answer, at the lowest priority on a busy machine."""


class PlanQuestion(NamedTuple):
    """What the program is asked."""

    kind: str
    """`rate` or `cause`."""
    first_step: int
    """The first step of the window."""
    number: float
    """`rate`: the number of engines; `cause`: the expected tokens per second."""


class _Expected(msgspec.Struct):
    """The content of `expected.json`."""

    settings: str
    """A digest of the settings that were simulated."""
    tokens_per_s: dict[int, float] = {}
    """By the number of serving engines."""


Ask = Callable[[Path, PlanQuestion], Awaitable[dict[str, Any]]]


class PlanWatch:
    """Follows the steps of a run on the event loop; `run` asks the program."""

    def __init__(self, config: Config, run_dir: Path, clock: Callable[[], float], ask: Ask | None = None):
        """Read what an earlier process of the run has found.

        Args:
            config: The run's config.
            run_dir: The run's folder.
            clock: Monotonic seconds.
            ask: Returns the answer to a question; None starts the program.
        """
        self._run_dir = run_dir
        self._clock = clock
        self._ask = ask or ask_program
        self._max_steps = config.run.max_steps
        self._enabled = config.run.keep_trajectories > 0
        self._expected = self._read_expected(_digest(config))
        self._failed: set[int] = set()
        """Numbers of engines for which there was no answer."""
        self._engines: deque[int] = deque(maxlen=AFTER_STEPS)
        """How many served at the ends of the last steps of this trainer."""
        self._question: PlanQuestion | None = None
        self._asked = asyncio.Event()
        self._causes: tuple[str, ...] = ()
        self._cause_s = -math.inf
        self._num_below = 0
        """Consecutive last steps at which the run was below its plan."""

    def begin_steps(self) -> None:
        """Compare no step before a start of the trainer with one after it."""
        self._engines.clear()
        self._num_below = 0

    def observe_step(self, records: Sequence[StepRecord], num_engines: int) -> tuple[Figure, tuple[str, ...]]:
        """Return the ratio of the last steps' throughput to what is expected, and why it is low.

        Args:
            records: The last `AFTER_STEPS` steps of the run, or more.
            num_engines: How many engines serve.
        """
        self._engines.append(num_engines)
        same = 0
        while same < len(self._engines) and self._engines[-1 - same] == num_engines:
            same += 1
        if not self._enabled or not num_engines or same <= WINDOW:
            return None, ()
        expected = self._expected.tokens_per_s.get(num_engines)
        if expected is None:
            if num_engines not in self._failed and (self._expected.tokens_per_s or same == AFTER_STEPS):
                self._ask_rate(records, num_engines)
            return None, ()
        first, last = records[-WINDOW - 1], records[-1]
        tokens = sum(record.trained_tokens for record in records[-WINDOW:])
        ratio = tokens / max(last.time_s - first.time_s, 1e-9) / expected
        self._num_below = self._num_below + 1 if ratio < NEARLY_PLAN else 0
        if not self._num_below:
            self._causes, self._cause_s = (), -math.inf
        elif self._num_below >= WINDOW and self._clock() - self._cause_s >= _CAUSE_EVERY_S:
            self._put(PlanQuestion("cause", first.step, expected))
        return ratio, self._causes

    def _ask_rate(self, records: Sequence[StepRecord], num_engines: int) -> None:
        last = records[-1].step
        left_s = seconds_left([record.time_s for record in records], self._max_steps - last)
        if left_s is not None and left_s >= _WORTH_S:
            self._put(PlanQuestion("rate", last - WINDOW_STEPS + 1, num_engines))

    def _put(self, question: PlanQuestion) -> None:
        if self._question is None:
            self._question = question
            self._asked.set()

    async def run(self) -> None:
        """Ask one question after the other, for ever."""
        while True:
            with waiting("idle"):
                await self._asked.wait()
                self._asked.clear()
                question = self._question
                assert question is not None
                try:
                    answer = await self._ask(self._run_dir, question)
                except (OSError, RuntimeError, subprocess.TimeoutExpired, msgspec.DecodeError) as error:
                    log.warning("the run is not compared with its plan (%s): %s", question.kind, error)
                    answer = {}
                finally:
                    self._question = None
            self._take_answer(question, answer)

    def _take_answer(self, question: PlanQuestion, answer: dict[str, Any]) -> None:
        if question.kind == "cause":
            self._causes, self._cause_s = tuple(answer.get("causes", ())), self._clock()
            if self._causes:
                log.warning("the run is slower than its plan: %s", "; ".join(self._causes))
            return
        engines = int(question.number)
        if "tokens_per_s" not in answer:
            self._failed.add(engines)
            return
        self._expected.tokens_per_s[engines] = rate = answer["tokens_per_s"]
        log.info("%d engines are expected to bring %.0f trained tokens/s", engines, rate)
        file = self._run_dir / FOLDER / _EXPECTED
        try:
            file.parent.mkdir(exist_ok=True)
            replace_file(file, msgspec.json.encode(self._expected))
        except OSError as error:
            log.warning("what the run should reach is not kept: %s", error)

    def _read_expected(self, settings: str) -> _Expected:
        try:
            found = msgspec.json.decode((self._run_dir / FOLDER / _EXPECTED).read_bytes(), type=_Expected)
        except (OSError, msgspec.DecodeError):
            found = _Expected("")
        if found.settings != settings:
            shutil.rmtree(self._run_dir / FOLDER, ignore_errors=True)
            return _Expected(settings)
        return found


async def ask_program(run_dir: Path, question: PlanQuestion) -> dict[str, Any]:
    """Start the program and return its answer; a cancellation ends the program.

    Raises:
        RuntimeError: It failed; the message has its last line.
        subprocess.TimeoutExpired: It took too long.
        OSError: It cannot be started.
    """
    process = _start_program(run_dir, question)

    def communicate() -> tuple[bytes, bytes]:
        with process:
            try:
                return process.communicate(timeout=_LIMIT_S)
            finally:
                process.kill()

    try:
        stdout, stderr = await call_in_thread(communicate, name="plan")
    finally:
        process.kill()
    if process.returncode:
        lines = stderr.decode(errors="replace").strip().splitlines()
        raise RuntimeError(lines[-1] if lines else f"exit code {process.returncode}")
    answer: dict[str, Any] = msgspec.json.decode(stdout)
    return answer


def _start_program(run_dir: Path, question: PlanQuestion) -> subprocess.Popen[bytes]:
    arguments = (question.kind, run_dir, str(question.first_step), str(question.number))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "async_rl.cli.expectation", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )


def _digest(config: Config) -> str:
    """Return a digest of the settings that a simulation of the run may depend on."""
    tree = msgspec.to_builtins(config)
    for section in ("run", "metrics", "doctor"):
        del tree[section]
    return hashlib.sha256(msgspec.json.encode(tree, order="sorted")).hexdigest()
