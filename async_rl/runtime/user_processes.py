"""Ends the processes that user code starts when what started them is over: docs/guide/agents.md.

```
 attempt ── ProcessScope ── marks what it starts ──► sandbox, agent program, `subprocess.Popen` of user code
 agent loops of a run ── ProcessScope ─────────────► MCP servers, whatever all trajectories share
 rewards of a run ── ProcessScope ─────────────────► what reward functions start
                        │ ended                           ▲ ends what is left over
 this process ──────────┴──── every few seconds ──► reaper (async_rl.runtime.reaper), a process of its own
```

Well-behaved code ends its processes itself, and nothing is left over. The reaper ends what a crash, a
swallowed cancellation, a double fork or a new session has left, and everything when this process is killed.
Processes of `multiprocessing` have no mark, because a fork keeps the environment of its parent. They may be
a pool that later attempts use too, so they belong to this process and end with it.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import os
import secrets
import select
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from functools import cache, wraps
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final, Literal

from async_rl.runtime.processes import start_time, this_process

log = logging.getLogger(__name__)

MARK: Final = "ASYNC_RL_STARTED_BY"
"""The environment variable that marks a process: `token:scope:kind`."""

Kind = Literal["sandbox", "mcp_server", "agent_program", "other"]
"""What a process is; `other`: started by user code itself."""

Reason = Literal["attempt_ended", "attempt_failed", "attempt_cancelled", "run_ended"]
"""Why the scope of a process is over; the reaper of an ended owner adds `owner_ended`."""

_REPORTS: Final = Path("logs", "reaped")
"""Below a run's folder: `TOKEN.json` is the report of a reaper, `TOKEN.owner` an owner whose reaper has not
ended yet."""
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
"""Tells hosts apart, and a host before and after it was started again."""
_PROGRAM: Final = Path(__file__).with_name("reaper.py")
_SWEEP_S: Final = 5.0
"""Time between two looks at all processes of this host, which take about 20 us per process."""
_GRACE_S: Final = 5.0
"""How long a process may take to end after SIGTERM."""
_SETTLE_S: Final = 8.0
"""How long the end of a run waits until nothing is left over; the reaper continues after it."""
_ENDING_S: Final = 0.1
"""Time for processes to end after SIGTERM, between two looks at them while the end of a run waits."""
_MAX_OVER: Final = 10_000
"""How many ended scopes are remembered with their names, for the log."""
_ANSWER_S: Final = 30.0
"""A reaper that stays silent for longer is replaced."""

_Key = tuple[int, int]
"""A process: its pid and its start time in clock ticks after boot."""

_current: ContextVar[ProcessScope | None] = ContextVar("process scope", default=None)


class ProcessScope:
    """What the processes that are started in its block may not outlive."""

    def __init__(self, name: str, on_reaped: Callable[[str, str], None] = lambda kind, reason: None) -> None:
        """Begin the scope.

        Args:
            name: What it is, for the log.
            on_reaped: Is called with kind and reason for each tree of processes that was left over, in a
                thread.
        """
        self.name = name
        self.on_reaped = on_reaped
        self.reason: str = ""
        self.number = _owner.begin_scope(self)
        self.at_end: list[Callable[[], None]] = []
        """What `call_at_scope_end` has registered."""

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let the processes that are started in the block, by its tasks and threads too, belong to it."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def end(self, reason: Reason) -> None:
        """End the scope, and soon its processes, without waiting for them."""
        self.reason = reason
        _owner.end_scope(self)
        for callback in [*self.at_end]:
            callback()


def marked(environment: Mapping[str, str], kind: Kind) -> dict[str, str]:
    """Return the environment for a process of the current scope; without one it ends with this process."""
    scope = _current.get()
    return {**environment, MARK: _owner.mark(0 if scope is None else scope.number, kind)}


def call_at_scope_end(callback: Callable[[], None]) -> Callable[[], None]:
    """Call a function when the current scope ends, in the thread that ends it; without a scope never.

    It releases what the block that made it cannot release, for example because a swallowed cancellation has
    left it stuck. It must not raise.

    Returns:
        A function that revokes the call.
    """
    if (scope := _current.get()) is None:
        return lambda: None
    scope.at_end.append(callback)
    return lambda: scope.at_end.remove(callback) if callback in scope.at_end else None


def run_folder() -> Path | None:
    """Return the folder of the run that this process belongs to, if it belongs to one."""
    return None if _owner.reports is None else _owner.reports.parents[1]


class ReleasedBy:
    """A block that has a command release a resource that is no process of this host, if the block cannot.

    The block releases the resource itself. The command runs, on this host and for at most 30 s, if the
    block's attempt is over and the block is not, or if this process is killed in the block. Enter the block
    before the resource is made: it begins once the reaper knows the command. Threads use `with`, coroutines
    `async with`.
    """

    def __init__(self, command: Sequence[str], kind: Kind = "sandbox") -> None:
        """Start nothing yet.

        Args:
            command: A program and its arguments; to release twice must do no harm.
            kind: What the resource is.
        """
        self._command = list(command)
        self._kind = kind

    def __enter__(self) -> None:
        scope = _current.get()
        self._number = _owner.hold(0 if scope is None else scope.number, self._kind, self._command)

    def __exit__(self, *error: object) -> None:
        _owner.release(self._number)

    async def __aenter__(self) -> None:
        await asyncio.to_thread(self.__enter__)

    async def __aexit__(self, *error: object) -> None:
        self.__exit__()


def is_settled() -> bool:
    """Return whether no process of an ended scope can be left."""
    return _owner.is_settled


async def settle() -> None:
    """Wait a few seconds until no process of an ended scope is left; return at once if there was none."""
    if not is_settled():
        await asyncio.to_thread(_owner.settle, _SETTLE_S)


def mark_all_children() -> None:
    """Let every process that this one starts end with it, even if not `subprocess` starts it.

    It is for a process that runs only user code, so that no other process inherits the mark.
    """
    os.environ[MARK] = _owner.mark(0, "other")


def scope_mark() -> str:
    """Return what a process that this one starts passes to `become_scope`."""
    return _owner.mark(0, "other")


def become_scope(mark: str) -> None:
    """Make this process a scope of the one that started it: what it starts may not outlive it.

    Args:
        mark: The result of `scope_mark` in the process that started it.
    """
    process = this_process("")
    os.environ[MARK] = f"{mark.split(':')[0]}:{process.pid}-{process.started}:other"


def write_reports(run_dir: Path) -> None:
    """Have the reaper write into the run's folder what it ends once this process has ended."""
    _owner.reports = run_dir / _REPORTS


def end_leftovers(run_dir: Path) -> None:
    """End what owners of a run on this host have left that were killed together with their reapers."""
    for path in (run_dir / _REPORTS).glob("*.owner"):
        with suppress(OSError, ValueError, KeyError, TypeError):  # it is being written, or damaged
            owner = json.loads(path.read_text())
            if owner["boot"] == _BOOT.read_text() and not _runs((owner["pid"], owner["started"])):
                log.info("process %d was killed with its reaper: ending what is left of it", owner["pid"])
                mark = f"{MARK}={owner['token']}:"
                reaper = _start_reaper(
                    owner["pid"], owner["started"], mark, str(path.absolute().with_suffix(""))
                )
                threading.Thread(target=reaper.communicate, name="reaper", daemon=True).start()


def read_reports(run_dir: Path) -> Counter[tuple[str, str]]:
    """Return what reapers have ended after the end of their owners, by kind and reason, once."""
    counts: Counter[tuple[str, str]] = Counter()
    for path in (run_dir / _REPORTS).glob("*.json"):
        with suppress(OSError, ValueError):
            counts.update((kind, reason) for kind, reason in json.loads(path.read_text()))
        path.unlink(missing_ok=True)
    return counts


@contextmanager
def attempt_scope(name: str, on_reaped: Callable[[str, str], None]) -> Iterator[None]:
    """Let the block be a scope that is over when the block ends, however it ends."""
    scope = ProcessScope(name, on_reaped)
    reason: Reason = "attempt_cancelled"
    try:
        with scope.active():
            yield
        reason = "attempt_ended"
    except Exception:
        reason = "attempt_failed"
        raise
    finally:
        scope.end(reason)


@asynccontextmanager
async def processes_ended(name: str) -> AsyncIterator[None]:
    """End all that was started in the block before the attempt around it goes on.

    Args:
        name: What the block is, for the log.
    """
    outer = _current.get()
    scope = ProcessScope(name) if outer is None else ProcessScope(name, outer.on_reaped)
    try:
        with scope.active():
            yield
    finally:
        scope.end("attempt_ended")
        await settle()


class _Owner:
    """The scopes of this process and its reaper, which is started with the first mark."""

    def __init__(self) -> None:
        self.reports: Path | None = None
        self._token = secrets.token_hex(8)
        self._lock = threading.Condition()
        self._next = 1
        self._live = {0}
        """The scopes that have not ended; 0 is this process."""
        self._over: dict[int, ProcessScope] = {}
        """Scopes that have ended lately, the oldest first."""
        self._held: dict[int, tuple[int, str, list[str]]] = {}
        self._adopted = set[_Key]()
        self._known_upto = 0
        """The reaper knows all scopes and held resources of smaller numbers."""
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._num_urgent = 0
        self._scopes_with_processes = set[int]()
        self._num_sweeps = 0
        self._num_over = 0

    def begin_scope(self, scope: ProcessScope) -> int:
        _follow_children()
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._live.add(number)
        return number

    def end_scope(self, scope: ProcessScope) -> None:
        with self._lock:
            if scope.number not in self._live:
                return
            self._live.discard(scope.number)
            if self._thread is not None:
                self._over[scope.number] = scope
                while len(self._over) > _MAX_OVER:
                    del self._over[next(iter(self._over))]

    def mark(self, scope: int, kind: str) -> str:
        self._start()
        self._scopes_with_processes.add(scope)
        return f"{self._token}:{scope}:{kind}"

    def hold(self, scope: int, kind: str, command: list[str]) -> int:
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._held[number] = scope, kind, command
            self._start()
            self._wake.set()
            self._lock.wait_for(lambda: number < self._known_upto, _ANSWER_S)
        return number

    def release(self, number: int) -> None:
        with self._lock:
            self._held.pop(number, None)
        self._wake.set()

    def adopt(self, pid: int) -> None:
        """Let a process end with this one."""
        self._start()
        with suppress(OSError), self._lock:  # it may have ended already
            self._adopted.add((pid, int(start_time(pid))))
        self._wake.set()

    def forget_in_child(self) -> None:
        """Be usable in a forked process, whose threads are gone: one of them may have held the lock."""
        self._lock = threading.Condition()

    @property
    def is_settled(self) -> bool:
        """Whether no scope that is over has ever started a process that was not swept up since."""
        return self._scopes_with_processes <= self._live

    def settle(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        with self._lock:
            while not self.is_settled:
                self._num_urgent = 2  # one may be under way
                goal = self._num_sweeps + self._num_urgent
                self._wake.set()
                while self._num_sweeps < goal:
                    if not self._lock.wait(deadline - time.monotonic()):
                        return
                if not self._num_over:
                    self._scopes_with_processes &= self._live
                self._lock.wait(_ENDING_S)

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="reaper", daemon=True)
                self._thread.start()

    def _serve(self) -> None:
        """Keep a reaper running, and exchange a request and an answer with it every few seconds."""
        while True:
            try:
                with self._reaper() as reaper:
                    self._exchange(reaper)
            except (OSError, ValueError) as error:
                log.warning("the reaper of user processes ended and is started again: %s", error)
            time.sleep(1.0)  # no asyncio here: a thread of its own

    @contextmanager
    def _reaper(self) -> Iterator[subprocess.Popen[bytes]]:
        process = this_process("")
        pid, started, report = process.pid, int(process.started), ""
        if self.reports is not None:
            report = str(self.reports.absolute() / self._token)
            self.reports.mkdir(parents=True, exist_ok=True)
            owner = {"boot": _BOOT.read_text(), "pid": pid, "started": started, "token": self._token}
            Path(report + ".owner").write_text(json.dumps(owner))
        self._known_upto = 0
        reaper = _start_reaper(pid, started, f"{MARK}={self._token}:", report)
        try:
            yield reaper
        finally:
            reaper.kill()
            reaper.communicate()

    def _exchange(self, reaper: subprocess.Popen[bytes]) -> None:
        assert reaper.stdin is not None
        assert reaper.stdout is not None
        answers = select.poll()  # `select` takes no descriptor above 1023, and a driver has thousands
        answers.register(reaper.stdout, select.POLLIN)
        swept_s = 0.0
        while True:
            with self._lock:
                sweep = self._num_urgent > 0 or time.monotonic() - swept_s >= _SWEEP_S
                over = self._scopes_with_processes - self._live
                if sweep:
                    self._adopted = {key for key in self._adopted if _runs(key)}
                request: dict[str, Any] = {
                    "upto": self._next,
                    "live": list(self._live),
                    "held": [[number, *held] for number, held in self._held.items()],
                    "adopted": list(self._adopted),
                    "sweep": sweep,
                }
                self._num_urgent = max(0, self._num_urgent - 1)
            reaper.stdin.write(json.dumps(request).encode() + b"\n")
            reaper.stdin.flush()
            if not answers.poll(1000 * _ANSWER_S):
                raise OSError(f"no answer within {_ANSWER_S:g} s")
            if not (line := reaper.stdout.readline()):
                raise OSError("it closed its output")
            answer = json.loads(line)
            for scope, kind, name in answer["found"]:
                self._report(scope, kind, name)
            swept_s = time.monotonic() if sweep else swept_s
            with self._lock:
                self._num_sweeps += sweep
                self._num_over = answer["num_over"] if sweep else self._num_over
                if sweep and not self._num_over:
                    self._scopes_with_processes -= over
                self._known_upto = request["upto"]
                self._lock.notify_all()
            if not self._num_urgent:
                self._wake.wait(max(0.0, swept_s + _SWEEP_S - time.monotonic()))
            self._wake.clear()

    def _report(self, number: str, kind: str, name: str) -> None:
        scope = self._over.get(int(number)) if number.isdigit() else None
        reason = "attempt_ended" if scope is None else scope.reason
        where = "a worker process" if scope is None else scope.name
        log.info("%s (%s) had outlived %s (%s) and was ended", name, kind, where, reason)
        if kind == "other":
            _warn_of_leftovers(name)
        if scope is not None:
            scope.on_reaped(kind, reason)


@cache
def _warn_of_leftovers(name: str) -> None:
    log.warning(
        "%s, a process that user code started, had outlived what started it and was ended. A process that "
        "several trajectories share belongs to the agent loop: start it in `__aenter__`; this is logged once",
        name,
    )


def _start_reaper(pid: int, started: int, mark: str, report: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(_PROGRAM), str(pid), str(started), mark, str(_GRACE_S), report],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if name != MARK},
        start_new_session=True,
        cwd="/",
    )


def _runs(key: _Key) -> bool:
    try:
        return int(start_time(key[0])) == key[1]
    except OSError:
        return False


def _follow_children() -> None:
    """Let `subprocess.Popen` mark what is started in a scope, and adopt what `multiprocessing` starts there.

    asyncio, anyio and `subprocess.run` start processes by the first, and pools of every kind by the second;
    nothing else passes through all user code. Outside of a scope both are unchanged.
    """
    if hasattr(subprocess.Popen.__init__, "__wrapped__"):
        return
    os.register_at_fork(after_in_child=_owner.forget_in_child)
    _mark_popen()
    _adopt_multiprocessing()


def _adopt_multiprocessing() -> None:
    original = BaseProcess.start

    @wraps(original)
    def start(self: BaseProcess) -> None:
        original(self)
        if _current.get() is not None and self.pid is not None:
            _owner.adopt(self.pid)

    BaseProcess.start = start  # type: ignore[method-assign]


def _mark_popen() -> None:
    original = subprocess.Popen.__init__
    signature = inspect.signature(original)

    @wraps(original)
    def start(self: Any, *args: Any, **kwargs: Any) -> None:
        if (scope := _current.get()) is None:
            return original(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        given = bound.arguments.get("env")
        environment = os.environ if given is None else given
        if given is None or MARK not in given:
            bound.arguments["env"] = {**environment, MARK: _owner.mark(scope.number, "other")}
        original(*bound.args, **bound.kwargs)

    subprocess.Popen.__init__ = start  # type: ignore[method-assign]


_owner: Final = _Owner()
