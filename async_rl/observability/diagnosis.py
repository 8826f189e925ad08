"""Why a run does not move: from who waits for what to the one thing that everything waits for. Pure.

```
 train loop ─batch─► groups that must go first ─trajectories─► trajectory ─┬─chunk, tool, reward, loop ─► leaf
     ▲                     (nobody runs it: lost)                          ├─slot──► holders (gone: leaked)
     │                                                                     └─engine─► its update, its repair
     └──admission, room in the spool──  rollouts                    weight update ─► engine, trainer
```

Waits make a graph: an actor waits for things, a thing is held up by other actors. `diagnose` walks it from
the train loop (from the run itself while it starts and ends) and comes to leaves: waits for something that is
nobody's wait in turn. Those are the candidates, ranked: first what cannot be (a group that nobody runs, a
slot held by the dead, a wait for what is there already), then what is over its limit, then the oldest. A walk
that ends nowhere but where it began is a deadlock.

A wait may last as long as its limit says. What is regular, a trainer step above all, may last four times the
longest one so far, and at least `stall_s`, once nothing moves at all: by its limit a step may take an hour,
but after steps of ten seconds one of a minute, in which nothing else moves, is no longer usual.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal

import msgspec

from async_rl.runtime.waits import Wait, WaitingActor, WaitNode

State = Literal["moving", "quiet", "overdue", "stalled"]
"""moving: work is done.  quiet: nothing moved for `stall_s`, and what is awaited is within its limit.
overdue: work is done, but a wait is over its limit.  stalled: nothing moves, nothing says that it will."""

Problem = Literal["hangs", "silent", "unnamed", "lost", "leaked", "dead", "asleep", "deadlock"]
"""hangs: does not end.  silent: an engine that sends nothing.  unnamed: at work, or in a wait without a name.
lost: outstanding, and nobody runs it.  leaked: held by somebody who is gone.  dead: a service that is gone.
asleep: waits for what is there already.  deadlock: waits for itself, in the end."""

_IMPOSSIBLE: Final = frozenset[Problem]({"lost", "leaked", "dead", "asleep"})

_CONTAINERS: Final = frozenset({"agent loop", "weight update"})
"""Waits around others of the same actor: they count for themselves only when nothing of ours is awaited in
them."""

_GRACE_S: Final = 5.0
"""What a wait may take beyond its limit: the limit's own timeout acts first, and its clean-up takes a while;
and how long what cannot be may seem to be, between two steps of the event loop."""

_REGULAR: Final = frozenset({"checkpoint", "publish", "snapshot", "trainer step"})
"""Waits whose earlier durations tell the next one's. Others do not: a search takes longer than a sum, and an
engine that has nothing to load is up to date at once."""

_USUAL: Final = 4.0
"""So many times the longest wait that ended well is no longer usual: a batch of long answers makes a step two
or three times longer, not four."""

_JUDGED_ELSEWHERE: Final = frozenset({"chunk", "first chunk"})
"""While the run moves, `engines.health` says which call takes too long: it knows what else goes on there."""

TRAIN_LOOP: Final = WaitNode("train loop")
RUN: Final = WaitNode("run")
ROLLOUTS: Final = WaitNode("service", "rollouts")
REPAIR: Final = WaitNode("service", "repair")

_AWAITED: Final[dict[str, str]] = {
    "admission": "admission",
    "agent loop": "agent loop {}",
    "batch": "a batch",
    "checkpoint": "a checkpoint",
    "chunk": "a chunk of {}",
    "devices": "its turn on the shared devices",
    "disk": "the disk",
    "drain": "running work to end",
    "engine": "an engine that serves",
    "engine start": "the start of {}",
    "engine update": "{} to take new weights",
    "evaluation": "the evaluation of a weight version",
    "export": "the Hugging Face export",
    "first chunk": "the first chunk of {}",
    "hand-over": "the trainer to move {}",
    "idle": "{}",
    "publish": "the trainer to publish {}",
    "reward": "reward {}",
    "reward queue": "a call of reward {} to end",
    "rollout worker": "a rollout worker to come up",
    "room": "room in the spool",
    "routing": "its routing rows",
    "send weights": "the trainer to send weights",
    "slot": "a free slot",
    "snapshot": "the trainer to copy its weights, {}",
    "sync lock": "another weight update to end",
    "tool": "tool {}",
    "trainer lock": "the trainer to be free",
    "trainer start": "the trainer to start",
    "trainer step": "trainer step {}",
    "trajectories": "its trajectories",
    "turn": "a turn of the policy",
    "weight update": "weight version {}",
}

_CULPRITS: Final[dict[str, str]] = {
    "admission": "admission does not open",
    "agent loop": "agent loop {} awaits something of its own that does not come",
    "batch": "no batch comes",
    "checkpoint": "the trainer does not finish its checkpoint",
    "chunk": "{} has gone silent in its calls",
    "devices": "the shared devices are not handed over",
    "disk": "the disk does not answer",
    "drain": "running work does not end",
    "engine": "no engine serves",
    "engine start": "{} does not start",
    "engine update": "{} does not take its new weights",
    "evaluation": "an evaluation does not end",
    "export": "the trainer does not finish its export",
    "first chunk": "{} does not begin to answer",
    "hand-over": "the trainer does not move {}",
    "idle": "nobody wakes it",
    "publish": "the trainer does not publish {}",
    "reward": "reward {} does not return",
    "reward queue": "no call of reward {} ends",
    "rollout worker": "no rollout worker comes up",
    "room": "the spool never has room",
    "routing": "routing rows are not decoded",
    "send weights": "the trainer does not send its weights",
    "slot": "no slot becomes free",
    "snapshot": "the trainer does not copy its weights, {}",
    "sync lock": "another weight update does not end",
    "tool": "tool {} does not return",
    "trainer lock": "the trainer is not given free",
    "trainer start": "the trainer does not start",
    "trainer step": "trainer step {} does not return",
    "trajectories": "its trajectories do not end",
    "turn": "the driver does not write a turn",
    "weight update": "weight version {} does not arrive",
}


_ANY_ENGINE: Final = "an engine"
"""For the start of engines that nobody named yet."""


class EngineView(msgspec.Struct, frozen=True, kw_only=True):
    """What the pool knows of an engine."""

    engine_id: str
    state: str
    """`joining`, `serving`, `updating`, `quarantined`."""
    running_calls: int = 0
    weight_version: int = 0
    patience_s: float = 0.0
    """So long may it say nothing to its calls, with all that it has to prefill."""
    error: str = ""


class QueueView(msgspec.Struct, frozen=True, kw_only=True):
    """What the queue knows of groups."""

    num_ready: int
    groups_per_batch: int
    in_flight: tuple[str, ...]
    due: tuple[str, ...]
    """Those in flight without which the next batch cannot go; empty where any will do."""
    left: tuple[str, ...] = ()
    """Those in flight that an earlier process left and rollouts have not begun again."""
    admits: bool
    """Whether one more group may be dispatched now."""


class SlotsView(msgspec.Struct, frozen=True, kw_only=True):
    """Who holds the slots of trajectories."""

    limit: int
    holders: tuple[str, ...]


class RunSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A run at one moment."""

    quiet_s: float
    """Since it last moved."""
    stall_s: float
    """So long may nothing move."""
    waits: Sequence[Wait]
    actors: Sequence[WaitingActor]
    limits_s: Mapping[str, float]
    """Longest waits by the config, by what is awaited."""
    longest_s: Mapping[str, float] = {}
    """Longest waits that ended well."""
    unheard_s: Mapping[str, float] = {}
    """By engine, since its last chunk."""
    engines: Sequence[EngineView] = ()
    queue: QueueView | None = None
    slots: SlotsView | None = None


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """A thing that holds up the run, or might."""

    problem: Problem
    on: str
    """Kind of wait (`runtime.waits.Awaited`), or `group`, `service`, `trajectory`, `task`."""
    target: str
    age_s: float
    limit_s: float | None
    """After which it counts as a fault; None where it is one at any age."""
    waiters: int
    """Waits of this kind on this target."""
    sentence: str
    chain: tuple[str, ...]
    """From the train loop to it, a sentence each."""

    @property
    def expected(self) -> bool:
        """Whether it may still come by itself."""
        return self.limit_s is not None and self.age_s <= self.limit_s


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """What holds up a run, the likeliest first."""

    state: State
    quiet_s: float
    causes: tuple[Cause, ...]

    @property
    def on(self) -> str:
        """What the likeliest cause is awaited for; empty without one."""
        return self.causes[0].on if self.causes else ""

    @property
    def summary(self) -> str:
        """One sentence: the likeliest cause."""
        return self.causes[0].sentence if self.causes else "nothing is waited for"

    @property
    def text(self) -> str:
        """A paragraph for people: the chain to the likeliest cause, and the other candidates."""
        if not self.causes:
            return f"nothing has moved for {seconds(self.quiet_s)}, and nobody waits for anything"
        first, *others = self.causes
        standing = self.state in ("quiet", "stalled")
        age = seconds(self.quiet_s)
        head = f"nothing has moved for {age}" if standing else f"the run last moved {age} ago"
        lines = [head, *(f"  <- {link}" for link in first.chain)]
        lines[1] = f"     {first.chain[0]}"
        lines.append(f"likely cause: {first.sentence}")
        lines += [f"also: {cause.sentence}" for cause in others[:3]]
        return "\n".join(lines)


def diagnose(snapshot: RunSnapshot) -> Diagnosis:
    """Find what everything waits for."""
    standing = snapshot.quiet_s >= snapshot.stall_s
    causes = _Walk(snapshot).causes()
    if not standing:
        overdue = _overdue(snapshot)
        known = {(cause.on, cause.target) for cause in overdue}
        causes = [*overdue, *(cause for cause in causes if (cause.on, cause.target) not in known)]
        state: State = "overdue" if overdue else "moving"
    else:
        state = "quiet" if causes and causes[0].expected else "stalled"
    return Diagnosis(state=state, quiet_s=snapshot.quiet_s, causes=tuple(causes))


def seconds(age_s: float) -> str:
    """An age for people: `0.4 s`, `405 s`."""
    return f"{age_s:.1f} s" if age_s < 10 else f"{age_s:.0f} s"


def phrase(on: str, target: str, why: str | None = None) -> str:
    """What is awaited, in words: `a chunk of engine-1`."""
    return _AWAITED[on].format(target or _ANY_ENGINE) + (f": {why}" if why else "")


class _Walk:
    """One walk through the graph of waits. Every node is looked at once, by way of the oldest wait."""

    def __init__(self, snapshot: RunSnapshot) -> None:
        self._snapshot = snapshot
        self._actors = {actor.who: actor for actor in snapshot.actors}
        self._children: dict[WaitNode, list[WaitNode]] = defaultdict(list)
        for actor in snapshot.actors:
            if actor.parent is not None:
                self._children[actor.parent].append(actor.who)
        self._waits: dict[WaitNode, list[Wait]] = defaultdict(list)
        self._waiters: dict[tuple[str, str], int] = defaultdict(int)
        for wait in sorted(snapshot.waits, key=lambda wait: -wait.age_s):
            self._waits[wait.who].append(wait)
            self._waiters[wait.on, wait.target] += 1
        self._engines = {engine.engine_id: engine for engine in snapshot.engines}
        self._seen: set[WaitNode] = set()
        self._found: dict[tuple[str, str], Cause] = {}
        self._cycles: list[tuple[Wait, tuple[str, ...]]] = []

    def causes(self) -> list[Cause]:
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
                    waits_for=phrase(wait.on, wait.target),
                )
        return sorted(self._found.values(), key=self._rank)

    def _rank(self, cause: Cause) -> tuple[int, float]:
        if cause.problem in _IMPOSSIBLE and cause.limit_s is None and cause.age_s > _GRACE_S:
            return 0, -cause.age_s
        return (2 if cause.expected else 1), -cause.age_s

    # -- who waits ----------------------------------------------------------------------------------------

    def _visit(self, node: WaitNode, path: tuple[WaitNode, ...], chain: tuple[str, ...]) -> None:
        """Follow what an actor waits for."""
        if node in self._seen:
            return
        self._seen.add(node)
        actor, path = self._actors.get(node), (*path, node)
        if actor is None:
            kind: Problem = "dead" if node.kind == "service" else "lost"
            self._add(kind, node.kind, node.id, self._snapshot.quiet_s, (*chain, f"{node}: nobody runs it"))
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
        if around:  # a user's loop that awaits something of its own, or our code between two waits
            self._leaf(around[-1], chain, age_s=min(around[-1].age_s, actor.untouched_s))
        elif self._waits[node]:
            self._add("asleep", "idle", str(node), self._snapshot.quiet_s, (*chain, f"{node} idles"))
        else:
            age = f"{node} has been at work for {seconds(actor.untouched_s)}, or waits without a name"
            self._add("unnamed", "task", str(node), actor.untouched_s, (*chain, age))

    # -- what is awaited ----------------------------------------------------------------------------------

    def _follow(self, wait: Wait, path: tuple[WaitNode, ...], chain: tuple[str, ...]) -> None:
        match wait.on:
            case "batch":
                self._batch(wait, path, chain)
            case "trajectories":
                self._turn_to(self._children[wait.who], wait, path, chain)
                if not self._children[wait.who]:
                    link = "nobody runs any of them"
                    self._add("lost", wait.who.kind, wait.who.id, wait.age_s, (*chain, link))
            case "admission":
                if self._snapshot.queue is not None and self._snapshot.queue.admits:
                    self._asleep(wait, chain)
                else:
                    self._turn_to([TRAIN_LOOP], wait, path, chain)
            case "room" | "trainer lock":
                self._turn_to([TRAIN_LOOP], wait, path, chain)
            case "sync lock" | "devices":
                self._turn_to([TRAIN_LOOP if wait.who != TRAIN_LOOP else REPAIR], wait, path, chain)
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

    def _turn_to(
        self, nodes: Iterable[WaitNode], wait: Wait, path: tuple[WaitNode, ...], chain: tuple[str, ...]
    ) -> None:
        for node in nodes:
            if node in path:
                self._cycles.append((wait, (*chain, f"{node} waits itself, see above")))
            else:
                self._visit(node, path, chain)

    def _batch(self, wait: Wait, path: tuple[WaitNode, ...], chain: tuple[str, ...]) -> None:
        queue = self._snapshot.queue
        if queue is None:
            self._leaf(wait, chain, age_s=wait.age_s)
            return
        awaited = queue.due or queue.in_flight
        groups = [WaitNode("group", group_id) for group_id in awaited if group_id not in queue.left]
        self._turn_to(groups, wait, path, chain)
        too_few = queue.num_ready + len(queue.in_flight) < queue.groups_per_batch
        if too_few or len(groups) < len(awaited):
            self._turn_to([ROLLOUTS], wait, path, chain)

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
        self._turn_to(alive, wait, path, chain)

    def _any_engine(self, wait: Wait, path: tuple[WaitNode, ...], chain: tuple[str, ...]) -> None:
        if any(engine.state == "serving" for engine in self._engines.values()):
            self._asleep(wait, chain)
        for engine in self._engines.values():
            if not self._held_up(engine, wait, path, chain) and engine.state != "serving":
                self._turn_to([REPAIR], wait, path, (*chain, _engine_link(engine)))
        if not self._engines:
            self._leaf(wait, chain, age_s=wait.age_s)

    def _held_up(
        self, engine: EngineView, wait: Wait, path: tuple[WaitNode, ...], chain: tuple[str, ...]
    ) -> bool:
        """Whether an engine stands still for somebody's sake, and then for whose."""
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
            self._turn_to([TRAIN_LOOP], wait, path, chain)
        return True

    # -- leaves -------------------------------------------------------------------------------------------

    def _silent(self, wait: Wait, chain: tuple[str, ...]) -> None:
        """An engine that owes a chunk. A call in its queue may wait for as long as others are served."""
        engine = self._engines.get(wait.target)
        unheard_s = self._snapshot.unheard_s.get(wait.target, wait.age_s)
        age_s = min(wait.age_s, unheard_s) if wait.on == "first chunk" else wait.age_s
        if engine is not None:
            chain = (*chain, f"{_engine_link(engine)}, last heard of {seconds(unheard_s)} ago")
        self._leaf(wait, chain, age_s=age_s, problem="silent")

    def _asleep(self, wait: Wait, chain: tuple[str, ...]) -> None:
        if wait.age_s <= _GRACE_S:
            return
        link = f"{wait.who} was not woken: there is {phrase(wait.on, wait.target)}"
        self._add("asleep", wait.on, wait.target, wait.age_s, (*chain, link))

    def _leaf(self, wait: Wait, chain: tuple[str, ...], *, age_s: float, problem: Problem = "hangs") -> None:
        limit_s = self._allowed_s(wait)
        self._add(problem, wait.on, wait.target, age_s, chain, limit_s=limit_s)

    def _allowed_s(self, wait: Wait) -> float:
        """How long it may last while nothing else moves."""
        stall_s, limit_s = self._snapshot.stall_s, _limit_s(wait, self._snapshot)
        if wait.on in _JUDGED_ELSEWHERE and wait.target in self._engines:
            return max(stall_s, self._engines[wait.target].patience_s)
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
        waits_for: str = "",
    ) -> None:
        """Remember a candidate; of several ways to it the first, which is the oldest."""
        if (on, target) in self._found:
            return
        if problem in ("unnamed", "asleep") or some_left:
            limit_s = self._snapshot.stall_s if some_left or problem == "unnamed" else None
        waiters = self._waiters.get((on, target), 0)
        match problem:
            case "lost":
                sentence = f"{on} {target} is lost: it is outstanding, and nobody runs it"
            case "dead":
                sentence = f"service {target} is dead: nothing that needs it can go on"
            case "leaked":
                sentence = f"slots have leaked: they are held by trajectories that are gone: {target}"
            case "asleep" if on == "idle":
                sentence = f"{target} idles though there is work for it"
            case "asleep":
                sentence = f"{waiters} wait for {_AWAITED[on].format(target)} that is there: nobody woke them"
            case "deadlock":
                sentence = f"deadlock: {_culprit(on, target)}, because who could see to it waits for it"
            case "unnamed":
                sentence = f"{target} computes, or waits for something without a name, for {seconds(age_s)}"
            case _:
                many = f"{waiters} wait for it, the longest " if waiters > 1 else ""
                limit = "" if limit_s is None else f", {_over(age_s, limit_s)}"
                sentence = f"{_culprit(on, target)} ({many}for {seconds(age_s)}{limit})"
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
    """Waits that are over their own limit, whatever else moves; the oldest of each target."""
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
            sentence=f"{_culprit(wait.on, wait.target)} (for {age})",
            chain=(f"{wait.who} waits for {phrase(wait.on, wait.target)} ({age})",),
        )
    return list(found.values())


def _culprit(on: str, target: str) -> str:
    return _CULPRITS[on].format(target or _ANY_ENGINE)


def _is_around(wait: Wait) -> bool:
    return wait.on in _CONTAINERS or (wait.on == "engine start" and not wait.target)


def _limit_s(wait: Wait, snapshot: RunSnapshot) -> float | None:
    return wait.limit_s if wait.limit_s is not None else snapshot.limits_s.get(wait.on)


def _over(age_s: float, limit_s: float) -> str:
    return f"limit {seconds(limit_s)}" if age_s <= limit_s else f"over its limit of {seconds(limit_s)}"


def _engine_link(engine: EngineView) -> str:
    error = f" ({engine.error})" if engine.error else ""
    calls = f"{engine.running_calls} calls"
    return f"{engine.engine_id}: {engine.state} at version {engine.weight_version}, {calls}{error}"


def _some(names: Sequence[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
