"""Find why a run does not move: follow the graph of waits to the one thing that everything waits for. Pure.

```
 train loop ─batch─► groups that must go first ─trajectories─► trajectory ─┬─chunk, tool, reward, loop ─► leaf
     ▲                     (no task runs it: lost)                         ├─slot──► holders (gone: leaked)
     │                                                                     └─engine─► its update, its repair
     └──admission, spool capacity────  rollouts                     weight update ─► engine, trainer
```

Waits form a graph: an actor waits for things, and other actors hold up a thing. `diagnose` walks the graph
from the train loop (from the run itself during start and shutdown) to its leaves: waits that no other wait
explains. The leaves are the candidate causes. They are ranked: impossible states first (a group that no task
runs, a slot whose holder is gone, a wait for something that is already available), then waits over their
limit, then by age. A walk that only returns to its own path is a deadlock.

While the run moves, the walk only says what the run waits for: an unlikely state of one moment is no fault,
and a wait is one only over its own limit (`_overdue`).

The limit of a wait bounds its duration. Once nothing else moves, a regular wait such as a trainer step may
last at most four times the longest one so far, and at least `stall_s`: the configured limit of a step may be
an hour, but after steps of ten seconds, a step of one minute in which nothing else moves is unusual.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal

import msgspec

from async_rl.runtime.waits import WAIT_KINDS, Wait, WaitingActor, WaitNode

State = Literal["moving", "quiet", "overdue", "stalled"]
"""moving: the run makes progress.  quiet: no progress for `stall_s`, but every wait is within its limit.
overdue: the run makes progress, but a wait is over its limit.  stalled: no progress, and a wait is over its
limit."""

Problem = Literal["none", "hangs", "silent", "unnamed", "lost", "leaked", "dead", "asleep", "deadlock"]
"""none: may still end by itself.  hangs: does not end.  silent: an engine sends nothing.
unnamed: computes, or waits without a name.
lost: outstanding, but no task runs it.  leaked: the holder is gone.  dead: the service has ended.
asleep: waits for something that is already available.  deadlock: waits, in the end, for itself."""

_IMPOSSIBLE: Final = frozenset[Problem]({"lost", "leaked", "dead", "asleep"})

_CONTAINERS: Final = frozenset({"agent loop", "weight update"})
"""Waits that enclose other waits of the same actor. They count only while no inner wait is open."""

_GRACE_S: Final = 5.0
"""Allowance beyond a limit: the limit's own timeout acts first and takes time to clean up. An impossible
state may also seem to exist for this long between two steps of the event loop."""

_REGULAR: Final = frozenset({"checkpoint", "publish", "snapshot", "trainer step"})
"""Waits whose earlier durations predict the next. Others vary: one tool call takes longer than another, and
an engine with nothing to load is up to date at once."""

_USUAL: Final = 4.0
"""A regular wait is unusual beyond this multiple of the longest one that succeeded: a batch of long answers
makes a step two or three times longer, not four."""

_JUDGED_ELSEWHERE: Final = frozenset({"chunk", "first chunk"})
"""While the run moves, `engines.health` judges these calls, because it knows the engine's other work."""

TRAIN_LOOP: Final = WaitNode("train loop")
RUN: Final = WaitNode("run")
ROLLOUTS: Final = WaitNode("service", "rollouts")
REPAIR: Final = WaitNode("service", "repair")
EVALUATION: Final = WaitNode("service", "evaluation")

_ANY_ENGINE: Final = "an engine"
"""Stands for the target when engines have no ids yet."""


class EngineView(msgspec.Struct, frozen=True, kw_only=True):
    """The pool's state of one engine."""

    engine_id: str
    state: str
    """`joining`, `serving`, `updating`, `evaluating`, `draining`, `quarantined`."""
    reserved: bool = False
    """Whether it serves evaluations only."""
    calls: int = 0
    """Its running calls."""
    prefill_tokens: int = 0
    """The number of tokens that it has to prefill before its calls continue."""
    weight_version: int = 0
    patience_s: float = 0.0
    """How long the engine may send nothing, given all that it has to prefill."""
    error: str = ""


class QueueView(msgspec.Struct, frozen=True, kw_only=True):
    """The trajectory queue's state of its groups."""

    num_ready: int
    groups_per_batch: int
    in_flight: tuple[str, ...]
    due: tuple[str, ...]
    """Groups in flight that the next batch needs; empty when any group will do."""
    restored: tuple[str, ...] = ()
    """Groups in flight that an earlier process left and that have not been resumed."""
    admits: bool
    """Whether one more group may be dispatched now."""


class SlotsView(msgspec.Struct, frozen=True, kw_only=True):
    """The slots of trajectories and their holders."""

    limit: int
    holders: tuple[str, ...]


class RunSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a run at one moment."""

    quiet_s: float
    """Time since the run last made progress."""
    stall_s: float
    """How long a run may make no progress."""
    waits: Sequence[Wait]
    actors: Sequence[WaitingActor]
    limits_s: Mapping[str, float]
    """Limits from the config, by kind of wait."""
    longest_s: Mapping[str, float] = {}
    """Longest waits that succeeded, by kind."""
    unheard_s: Mapping[str, float] = {}
    """Time since the last chunk, by engine."""
    engines: Sequence[EngineView] = ()
    has_capacity: bool = True
    """Whether an engine would be given a call now, if one serves."""
    queue: QueueView | None = None
    slots: SlotsView | None = None


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """Something that holds up the run, or might."""

    problem: Problem
    on: str
    """Kind of wait (`runtime.waits.WAIT_KINDS`), or `group`, `service`, `trajectory`, `task`."""
    target: str
    age_s: float
    limit_s: float | None
    """Age at which it counts as a fault; None if there is no such age: `problem` says whether it is one."""
    waiters: int
    """Number of waits of this kind on this target."""
    sentence: str
    chain: tuple[str, ...]
    """One sentence per link, from the train loop to this cause."""

    @property
    def expected(self) -> bool:
        """Whether it is no fault: the run moves, or the wait is within its limit."""
        return self.problem == "none"


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """The causes that hold up a run, the likeliest first."""

    state: State
    quiet_s: float
    causes: tuple[Cause, ...]

    @property
    def on(self) -> str:
        """Kind of wait of the likeliest cause; empty without a cause."""
        return self.causes[0].on if self.causes else ""

    @property
    def summary(self) -> str:
        """The likeliest cause in one sentence."""
        return self.causes[0].sentence if self.causes else "no wait is open"

    @property
    def text(self) -> str:
        """A paragraph for people: the chain to the likeliest cause, then the other candidates."""
        if not self.causes:
            return f"nothing has moved for {seconds(self.quiet_s)}, and no wait is open"
        first, *others = self.causes
        stalled = self.state in ("quiet", "stalled")
        age = seconds(self.quiet_s)
        head = f"nothing has moved for {age}" if stalled else f"the run last moved {age} ago"
        lines = [head, *(f"  <- {link}" for link in first.chain)]
        lines[1] = f"     {first.chain[0]}"
        lines.append(first.sentence if first.expected else f"likely cause: {first.sentence}")
        lines += [f"also: {cause.sentence}" for cause in others[:3]]
        return "\n".join(lines)


def diagnose(snapshot: RunSnapshot) -> Diagnosis:
    """Rank the causes that hold up a run, and judge its state."""
    stalled = snapshot.quiet_s >= snapshot.stall_s
    causes = _Walk(snapshot).ranked_causes()
    if not stalled:
        overdue = _overdue(snapshot)
        known = {(cause.on, cause.target) for cause in overdue}
        causes = [*overdue, *(cause for cause in causes if (cause.on, cause.target) not in known)]
        state: State = "overdue" if overdue else "moving"
    else:
        state = "quiet" if causes and causes[0].expected else "stalled"
    return Diagnosis(state=state, quiet_s=snapshot.quiet_s, causes=tuple(causes))


def seconds(age_s: float) -> str:
    """Format an age for people: `0.4 s`, `405 s`."""
    return f"{age_s:.1f} s" if age_s < 10 else f"{age_s:.0f} s"


def phrase(on: str, target: str, why: str | None = None) -> str:
    """Describe what is awaited: `a chunk of engine-1`."""
    return WAIT_KINDS[on].awaited.format(target or _ANY_ENGINE) + (f": {why}" if why else "")


class _Walk:
    """One walk through the graph of waits. It visits every node once, along the oldest wait."""

    def __init__(self, snapshot: RunSnapshot) -> None:
        self._snapshot = snapshot
        self._moves = snapshot.quiet_s < snapshot.stall_s
        self._actors = {actor.who: actor for actor in snapshot.actors}
        self._children: dict[WaitNode, list[WaitNode]] = defaultdict(list)
        for actor in snapshot.actors:
            if actor.parent is not None:
                self._children[actor.parent].append(actor.who)
        self._waits: dict[WaitNode, list[Wait]] = defaultdict(list)
        self._follows_full_engines = False
        self._waiters: dict[tuple[str, str], int] = defaultdict(int)
        for wait in sorted(snapshot.waits, key=lambda wait: -wait.age_s):
            self._waits[wait.who].append(wait)
            self._waiters[wait.on, wait.target] += 1
        self._engines = {engine.engine_id: engine for engine in snapshot.engines}
        self._seen: set[WaitNode] = set()
        self._found: dict[tuple[str, str], Cause] = {}
        self._cycles: list[tuple[Wait, tuple[str, ...]]] = []

    def ranked_causes(self) -> list[Cause]:
        root = TRAIN_LOOP if TRAIN_LOOP in self._actors else RUN
        if root in self._actors:
            self._visit(root, (), ())
        if not self._found:
            for wait, chain in self._cycles:
                self._add(
                    "deadlock",
                    wait.on,
                    wait.target,
                    wait.age_s,
                    chain,
                )
        return sorted(self._found.values(), key=self._rank)

    def _rank(self, cause: Cause) -> tuple[int, float]:
        if cause.problem in _IMPOSSIBLE and cause.limit_s is None and cause.age_s > _GRACE_S:
            return 0, -cause.age_s
        return (2 if cause.expected else 1), -cause.age_s

    # -- actors that wait ---------------------------------------------------------------------------------

    def _visit(self, node: WaitNode, path: tuple[WaitNode, ...], chain: tuple[str, ...]) -> None:
        """Follow what an actor waits for."""
        if node in self._seen:
            return
        self._seen.add(node)
        actor, path = self._actors.get(node), (*path, node)
        if actor is None:
            kind: Problem = "dead" if node.kind == "service" else "lost"
            self._add(kind, node.kind, node.id, self._snapshot.quiet_s, (*chain, f"{node}: no task runs it"))
            return
        busy = [wait for wait in self._waits[node] if wait.on != "idle"]
        around = [wait for wait in busy if _is_around(wait)]
        inside = [wait for wait in busy if not _is_around(wait)]
        for wait in around:
            chain = (*chain, self._link(wait))
        for wait in inside:
            self._follow(wait, path, (*chain, self._link(wait)))
        if inside:
            return
        if around:  # a user's loop that awaits something without a name, or our code between two waits
            self._leaf(around[-1], chain, age_s=min(around[-1].age_s, actor.untouched_s))
        elif self._waits[node]:
            self._add("asleep", "idle", str(node), self._snapshot.quiet_s, (*chain, f"{node} idles"))
        else:
            age = f"{node} has computed, or waited without a name, for {seconds(actor.untouched_s)}"
            self._add("unnamed", "task", str(node), actor.untouched_s, (*chain, age))

    # -- things that are awaited --------------------------------------------------------------------------

    def _follow(self, wait: Wait, path: tuple[WaitNode, ...], chain: tuple[str, ...]) -> None:
        match wait.on:
            case "batch":
                self._batch(wait, path, chain)
            case "trajectories":
                # Services of rollouts, such as those that watch workers, make no trajectories.
                made_by = [child for child in self._children[wait.who] if child.kind != "service"]
                self._visit_all(made_by, wait, path, chain)
                if not made_by:
                    link = "no task runs any of them"
                    self._add("lost", wait.who.kind, wait.who.id, wait.age_s, (*chain, link))
            case "admission":
                if self._snapshot.queue is not None and self._snapshot.queue.admits:
                    self._asleep(wait, chain)
                else:
                    self._visit_all([TRAIN_LOOP], wait, path, chain)
            case "capacity" | "trainer lock" | "next update":
                self._visit_all([TRAIN_LOOP], wait, path, chain)
            case "sync lock" | "devices":
                self._visit_all([TRAIN_LOOP if wait.who != TRAIN_LOOP else REPAIR], wait, path, chain)
            case "slot":
                self._slot(wait, path, chain)
            case "engine":
                self._any_engine(wait, path, chain)
            case "chunk" | "first chunk":
                engine = self._engines.get(wait.target)
                if engine is None or not self._held_up(engine, wait, path, chain):
                    self._silent(wait, chain)
            case _:
                self._leaf(wait, chain, age_s=wait.age_s)

    def _visit_all(
        self, nodes: Iterable[WaitNode], wait: Wait, path: tuple[WaitNode, ...], chain: tuple[str, ...]
    ) -> None:
        for node in nodes:
            if node in path:
                self._cycles.append((wait, (*chain, f"{node} is itself waiting, see above")))
            else:
                self._visit(node, path, chain)

    def _batch(self, wait: Wait, path: tuple[WaitNode, ...], chain: tuple[str, ...]) -> None:
        queue = self._snapshot.queue
        if queue is None:
            self._leaf(wait, chain, age_s=wait.age_s)
            return
        awaited = queue.due or queue.in_flight
        groups = [WaitNode("group", group_id) for group_id in awaited if group_id not in queue.restored]
        self._visit_all(groups, wait, path, chain)
        too_few = queue.num_ready + len(queue.in_flight) < queue.groups_per_batch
        if too_few or len(groups) < len(awaited):
            self._visit_all([ROLLOUTS], wait, path, chain)

    def _slot(self, wait: Wait, path: tuple[WaitNode, ...], chain: tuple[str, ...]) -> None:
        slots = self._snapshot.slots
        if slots is None:
            self._leaf(wait, chain, age_s=wait.age_s)
            return
        if len(slots.holders) < slots.limit:
            self._asleep(wait, chain)
            return
        holders = [WaitNode("trajectory", holder) for holder in slots.holders]
        alive = [holder for holder in holders if holder in self._actors]
        if len(alive) < len(holders):
            gone = [holder.id for holder in holders if holder not in self._actors]
            link = f"{len(gone)} of {slots.limit} slots are held by trajectories that are gone: {_some(gone)}"
            self._add("leaked", "slot", _some(gone), wait.age_s, (*chain, link), some_left=bool(alive))
        self._visit_all(alive, wait, path, chain)

    def _any_engine(self, wait: Wait, path: tuple[WaitNode, ...], chain: tuple[str, ...]) -> None:
        if any(engine.state == "serving" for engine in self._engines.values()):
            if self._snapshot.has_capacity:
                self._asleep(wait, chain)
            else:
                self._full_engines(wait, chain)
        for engine in self._engines.values():
            if engine.reserved or self._held_up(engine, wait, path, chain) or engine.state == "serving":
                continue
            returned_by = EVALUATION if engine.state == "evaluating" else REPAIR
            self._visit_all([returned_by], wait, path, (*chain, _engine_link(engine)))
        if not self._engines:
            self._leaf(wait, chain, age_s=wait.age_s)

    def _full_engines(self, wait: Wait, chain: tuple[str, ...]) -> None:
        """Follow the oldest call of each serving engine: another one begins when a call gets its tokens.

        Only for the first of the calls that wait: all wait for the same.
        """
        if self._follows_full_engines:
            return
        self._follows_full_engines = True
        calls: dict[str, Wait] = {}
        for call in (call for waits in self._waits.values() for call in waits):
            if call.on in ("first chunk", "chunk"):
                calls[call.target] = max(calls.get(call.target, call), call, key=lambda each: each.age_s)
        serving = [engine.engine_id for engine in self._engines.values() if engine.state == "serving"]
        oldest = [calls[engine_id] for engine_id in serving if engine_id in calls]
        for call in oldest:
            self._silent(call, (*chain, self._link(call)))
        if not oldest:
            self._leaf(wait, chain, age_s=wait.age_s)

    def _held_up(
        self, engine: EngineView, wait: Wait, path: tuple[WaitNode, ...], chain: tuple[str, ...]
    ) -> bool:
        """Follow the update or start that keeps an engine from serving; False if there is none."""
        if engine.state not in ("updating", "joining"):
            return False
        updates = (w for waits in self._waits.values() for w in waits)
        owners = [
            w for w in updates if w.on in ("engine update", "engine start") and w.target == engine.engine_id
        ]
        chain = (*chain, _engine_link(engine))
        for update in owners:
            self._leaf(update, (*chain, self._link(update)), age_s=update.age_s)
        if not owners:
            self._visit_all([TRAIN_LOOP], wait, path, chain)
        return True

    # -- leaves -------------------------------------------------------------------------------------------

    def _silent(self, wait: Wait, chain: tuple[str, ...]) -> None:
        """Judge an engine that owes a chunk. A queued call may wait as long as the engine serves others."""
        engine = self._engines.get(wait.target)
        unheard_s = self._snapshot.unheard_s.get(wait.target, wait.age_s)
        age_s = min(wait.age_s, unheard_s) if wait.on == "first chunk" else wait.age_s
        if engine is not None:
            chain = (*chain, f"{_engine_link(engine)}, last heard of {seconds(unheard_s)} ago")
        self._leaf(wait, chain, age_s=age_s, problem="silent")

    def _asleep(self, wait: Wait, chain: tuple[str, ...]) -> None:
        if wait.age_s <= _GRACE_S:
            return
        link = f"{wait.who} was not woken: {phrase(wait.on, wait.target)} is available"
        self._add("asleep", wait.on, wait.target, wait.age_s, (*chain, link))

    def _leaf(self, wait: Wait, chain: tuple[str, ...], *, age_s: float, problem: Problem = "hangs") -> None:
        limit_s = self._allowed_s(wait)
        self._add(problem, wait.on, wait.target, age_s, chain, limit_s=limit_s)

    def _allowed_s(self, wait: Wait) -> float | None:
        """How long a wait may last, in seconds; while nothing else moves, no wait is without a limit."""
        stall_s, limit_s = self._snapshot.stall_s, _limit_s(wait, self._snapshot)
        if wait.on in _JUDGED_ELSEWHERE and wait.target in self._engines:
            return max(stall_s, self._engines[wait.target].patience_s)
        if self._moves:
            return limit_s
        longest_s = self._snapshot.longest_s.get(wait.on) if wait.on in _REGULAR else None
        if longest_s is None:
            return stall_s if limit_s is None else limit_s
        usual_s = max(stall_s, _USUAL * longest_s)
        return usual_s if limit_s is None else min(limit_s, usual_s)

    def _link(self, wait: Wait) -> str:
        limit_s = _limit_s(wait, self._snapshot)
        age = seconds(wait.age_s) if limit_s is None else f"{seconds(wait.age_s)}, limit {seconds(limit_s)}"
        why = f": {wait.why}" if wait.why else ""
        return f"{wait.who} waits for {phrase(wait.on, wait.target)} ({age}){why}"

    def _add(
        self,
        problem: Problem,
        on: str,
        target: str,
        age_s: float,
        chain: tuple[str, ...],
        *,
        limit_s: float | None = None,
        some_left: bool = False,
    ) -> None:
        """Record a candidate; of several paths to it, keep the first, which is the oldest."""
        if (on, target) in self._found:
            return
        if problem == "unnamed" or some_left:
            limit_s = self._snapshot.stall_s
        if self._moves or (limit_s is not None and age_s <= limit_s):
            problem = "none"
        waiters = self._waiters.get((on, target), 0)
        many = f"{waiters} waiting, the longest " if waiters > 1 else ""
        limit = "" if limit_s is None else f", {_over(age_s, limit_s)}"
        age = f"{many}for {seconds(age_s)}{limit}"
        match problem:
            case "none":
                awaited = phrase(on, target) if on in WAIT_KINDS else f"{on} {target}".removeprefix("task ")
                sentence = f"the run waits for {awaited} ({age})"
            case "lost":
                sentence = f"{on} {target} is lost: it is outstanding, but no task runs it"
            case "dead":
                sentence = f"service {target} has ended: nothing that needs it can continue"
            case "leaked":
                sentence = f"slots have leaked: trajectories that are gone hold them: {target}"
            case "asleep" if on == "idle":
                sentence = f"{target} is idle although there is work for it"
            case "asleep":
                sentence = f"{waiters} missed a wake-up: {phrase(on, target)} is available"
            case "deadlock":
                sentence = f"deadlock: {_fault(on, target)}, because its only remedy waits for it"
            case "unnamed":
                sentence = f"{target} computes, or waits without a name, for {seconds(age_s)}"
            case _:
                sentence = f"{_fault(on, target)} ({age})"
        self._found[on, target] = Cause(
            problem=problem,
            on=on,
            target=target,
            age_s=age_s,
            limit_s=limit_s,
            waiters=waiters,
            sentence=sentence,
            chain=chain,
        )


def _overdue(snapshot: RunSnapshot) -> list[Cause]:
    """Return waits over their own limit, the oldest of each target, whether or not the run moves."""
    found: dict[tuple[str, str], Cause] = {}
    waiters: dict[tuple[str, str], int] = defaultdict(int)
    for wait in snapshot.waits:
        waiters[wait.on, wait.target] += 1
    ours = (wait for wait in snapshot.waits if wait.on not in _JUDGED_ELSEWHERE)
    for wait in sorted(ours, key=lambda wait: -wait.age_s):
        limit_s, age_s = _limit_s(wait, snapshot), wait.age_s
        if limit_s is None or age_s <= limit_s + _GRACE_S or (wait.on, wait.target) in found:
            continue
        age = f"{seconds(age_s)}, {_over(age_s, limit_s)}"
        found[wait.on, wait.target] = Cause(
            problem="hangs",
            on=wait.on,
            target=wait.target,
            age_s=age_s,
            limit_s=limit_s,
            waiters=waiters[wait.on, wait.target],
            sentence=f"{_fault(wait.on, wait.target)} (for {age})",
            chain=(f"{wait.who} waits for {phrase(wait.on, wait.target)} ({age})",),
        )
    return list(found.values())


def _fault(on: str, target: str) -> str:
    return WAIT_KINDS[on].fault.format(target or _ANY_ENGINE)


def _is_around(wait: Wait) -> bool:
    return wait.on in _CONTAINERS or (wait.on == "engine start" and not wait.target)


def _limit_s(wait: Wait, snapshot: RunSnapshot) -> float | None:
    return wait.limit_s if wait.limit_s is not None else snapshot.limits_s.get(wait.on)


def _over(age_s: float, limit_s: float) -> str:
    return f"limit {seconds(limit_s)}" if age_s <= limit_s else f"over its limit of {seconds(limit_s)}"


def _engine_link(engine: EngineView) -> str:
    error = f" ({engine.error})" if engine.error else ""
    calls = f"{engine.calls} calls"
    return f"{engine.engine_id}: {engine.state} at version {engine.weight_version}, {calls}{error}"


def _some(names: Sequence[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
