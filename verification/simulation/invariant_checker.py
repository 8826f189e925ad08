"""Sees all that engines say, trainers get and the ledger writes, and keeps what cannot be right.

It trusts nothing that the program computes: tokens are compared with those that an engine drew after the same
text, rows with those that the engine computes for (position, token, version), the ledger's tables with the
batches that the trainer saw. See `docs/design/simulation.md` for the list.

Its memory is bounded by what is in flight: it forgets a token when it is too old to be trained, and keeps one
bit of each trajectory and position that are settled for good.

It keeps two digests, unless it is built without. `trace` covers every event and every turn of a task, with
its virtual time. `decisions` covers only what was admitted, sampled, trained and settled, and by which
versions. It hashes no name of a task, class, module, metric or message, so that it is the same before and
after a renaming.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import math
import os
import sqlite3
import struct
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextvars import ContextVar
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from async_rl.config import Config
from async_rl.engine_protocol import Chunk, Finish, GenerateRequest, check_partition
from async_rl.engines.simulated import kept_tokens, routing_rows, scored_tokens
from async_rl.errors import EngineError
from async_rl.run.recovery import node_folder
from async_rl.types import (
    BoolArray,
    ExpertIdArray,
    Int32Array,
    SamplingMask,
    StoredTrajectory,
    TrainBatch,
    root_of,
)
from async_rl.weights import publisher
from async_rl.weights.checksums import CANARY_SUFFIX
from verification.simulation.compact_set import CompactSet
from verification.simulation.faults import ENGINE_FAULTS, FaultKind
from verification.simulation.scenario import FACTS, Scenario
from verification.simulation.simulated_models import score_seed

_KEPT_EVENTS: Final = 60
_HOLDING: Final = frozenset({"in_flight", "queued", "trained"})
_ROUNDING_S: Final = 0.001
_LINK_SLACK_S: Final = 2.0
"""A rollout worker learns with a delay that engines are held."""

_MAX_RECOVERIES: Final = 4
"""Failures after which a trajectory gives up its missing rows."""
_NO_FAILURES: Final = frozenset({"abort", "LocalShortage", "EngineBusy"})
"""Ends of calls for missing rows that are none of these failures."""
_AHEAD: Final = 8
"""Versions after the newest that a wrong row may claim."""

_INVERSE_OF_7: Final = pow(7, -1, FACTS.num_experts)

_connect = sqlite3.connect  # the disk of the simulation is not in our way


reward_source: ContextVar[str] = ContextVar("reward_source")
"""Which trajectory calls an engine, where it is not its task's name: a branch."""


caller_is_given_up: ContextVar[Callable[[], bool]] = ContextVar("given up", default=lambda: False)
"""Whether the driver may have given up the worker that makes a call: another one continues the trajectory."""


_attempt: ContextVar[int] = ContextVar("attempt", default=0)
"""Which attempt of its trajectory a task belongs to: one that has ended may still leave its calls."""


def group_score(sampled: np.ndarray) -> float:
    """Return the reward of a trajectory by the tokens that it sampled, where one call rewards a group."""
    return zlib.crc32(sampled.astype("<i4").tobytes()) % 1000 / 1000


class AttemptLimit(NamedTuple):
    """The time limit of an attempt."""

    ends_s: float
    """The `InvariantChecker.served_s` at which it is reached."""
    begun_s: float
    """When the attempt began."""


class InvariantChecker:
    """See the module.

    Example:
        >>> checker = InvariantChecker(scenario)
        >>> checker.trains(batch, version=3, step=4)
        >>> checker.violations
        ['step 4 trains trajectory ... twice']
    """

    def __init__(self, scenario: Scenario, *, digests: bool = True) -> None:
        """Start with nothing seen.

        Args:
            scenario: The run.
            digests: Whether to compute `trace` and `decisions`, which takes a third of the time.
        """
        self._config = scenario.config
        self._digests = digests
        self.violations: list[str] = []
        self.met_faults: Counter[FaultKind] = Counter()
        """By kind: those that really happened."""
        self.lost_nodes: set[str] = set()
        """The nodes that were lost with their frames."""
        self.wiped: set[str] = set()
        """The folders of rollout workers that nodes have lost."""
        self.absent_until_s: dict[str, float] = {}
        """Until when nodes do not answer."""
        self.unasked_nodes: set[str] = set()
        """The nodes that this driver has asked for nothing yet, or not since they failed to answer."""
        self.lost_frames: set[str] = set()
        """Frames in the run's folder of which a power cut has taken something."""
        self.cut_off_folders: set[str] = set()
        """The names of the folders of workers that were cut off from the driver."""
        self.have_sums = False
        """Whether this driver knows the checksums of weights that an engine has really loaded."""
        self.refused_needlessly = set[str]()
        """Trajectories of this driver whose requests an engine refused while another could accept them."""
        self.deaf = False
        """While a killed driver's remains are cleared away: what they do never happened."""
        self.now: Callable[[], float] = lambda: 0.0
        self.events: deque[str] = deque(maxlen=_KEPT_EVENTS)
        """The last ones, in words."""
        self._trace = hashlib.blake2b(digest_size=8)
        self._decisions = hashlib.blake2b(digest_size=8)
        self._numbers: dict[str, dict[str | None, int]] = defaultdict(dict)
        """The names that decisions are about, by kind, each numbered by its first appearance."""
        self._said: dict[tuple[int, int], tuple[tuple[int, int, float], ...]] = {}
        """Versions, rollbacks before them (`weights_of`) and log-probs of the tokens that engines drew, by
        the digest of the text before. The garbage collector does not visit tuples of numbers; it would visit
        lists."""
        self._heads: dict[str, dict[str, list[int]]] = defaultdict(dict)
        """The tokens that the next call of a trajectory must continue, by root and name."""
        self._attempts: Counter[str] = Counter()
        """The number of attempts of a trajectory that have begun, by root."""
        self._unaccounted: Counter[str] = Counter()
        """Calls of a trajectory that have begun and not ended with their engine's account of versions."""
        self._unaware_until_s = -math.inf
        """Until when loops may reach limits by a clock that does not know which engines serve."""
        self._recoveries: dict[str, list[str]] = defaultdict(list)
        """How each call for the missing rows of a trajectory ended."""
        self.unrecorded = set[int]()
        """Steps whose line in `metrics.jsonl` a power cut may have taken."""
        self._steps: dict[int, frozenset[str]] = {}
        """What was trained in the steps that a restart may undo, or that the ledger still lists."""
        self._trained = CompactSet()
        """What was trained in all other steps."""
        self._rollbacks: list[int] = []
        self._fates: dict[str, tuple[int, set[str]]] = {}
        """Position and ends of the groups in the ledger."""
        self._names: set[str] = set()
        """The trajectories in the ledger."""
        self._seen = CompactSet()
        self._used = CompactSet()
        """The positions used up by groups that have left the ledger."""
        self._held = CompactSet()
        """The positions of which such a group was trained."""
        self._num_positions = 0
        self._tasks_at: dict[int, str] = {}
        """The task of each position, which no restart and no retry changes."""
        self._unseen_before = self._skipped_before = 0
        """What the law of conservation lacks since the last power cut, which undoes what was counted."""
        self._newest = self._saved = 0
        self.tokens_said = 0
        self._served_s = 0.0
        self._serving_since_s: float | None = None
        """When `_served_s` was counted last; None if no engine has served since."""

    def begin_incarnation(self, config: Config, now: Callable[[], float]) -> None:
        """Check a new incarnation of the driver, which may have another config; no engine serves yet.

        Args:
            config: Its config.
            now: Its clock, in virtual seconds.
        """
        self.engines_serve(False)
        self.have_sums = False
        self.refused_needlessly = set()
        self._config, self.now = config, now

    # -- the trace ----------------------------------------------------------------------------------------

    def note(self, event: str) -> None:
        """Take down an event."""
        if self.deaf:
            return
        line = f"{self.now():11.4f}  {event}"
        self.events.append(line)
        if self._digests:
            self._trace.update(line.encode())

    def turn(self, number: int) -> None:
        """A task had its turn."""
        if self.deaf or not self._digests:
            return
        self._trace.update(struct.pack("<dq", self.now(), number))

    @property
    def num_kept_tokens(self) -> int:
        """Sampled tokens that it remembers, because they may still be trained."""
        return len(self._said)

    @property
    def num_expected_tokens(self) -> int:
        """Tokens that it expects at the beginning of further calls."""
        return sum(len(tokens) for heads in self._heads.values() for tokens in heads.values())

    @property
    def trace(self) -> str:
        """A hash of everything that happened, in its order."""
        return self._trace.hexdigest()

    def decided(self, what: str, *values: float | bytes) -> None:
        """Add a decision to its digest.

        Args:
            what: The kind of decision. It is hashed as it is written here, so a renaming leaves it alone.
            values: Numbers, and arrays as bytes. A name goes through `_numbered` first.
        """
        if self.deaf or not self._digests:
            return
        self._decisions.update(msgspec.msgpack.encode((what, values)))

    @property
    def decisions(self) -> str:
        """A hash of all decisions, in their order; see the module."""
        return self._decisions.hexdigest()

    def _numbered(self, kind: str, *names: str | None) -> list[int]:
        """Names as numbers: their wording does not count. `trajectory 7` is the same as `7`."""
        if not self._digests:
            return []
        numbers = self._numbers[kind]
        return [numbers.setdefault(name and name.split(" ")[-1], len(numbers)) for name in names]

    def fail(self, violation: str) -> None:
        """Something is not as it must always be."""
        if self.deaf:
            return
        self.violations.append(violation)
        self.note(f"VIOLATION {violation}")

    def met(self, fault: FaultKind) -> None:
        """A fault has happened."""
        if self.deaf:
            return
        self.count(fault)
        self.note(f"fault {fault}")
        self.decided("fault", *self._numbered("fault", fault))

    def count(self, fault: FaultKind) -> None:
        """Count a fault that is not part of the trace: of the user's code, of the driver."""
        if not self.deaf:
            self.met_faults[fault] += 1

    # -- engines ------------------------------------------------------------------------------------------

    def published(self, engine_id: str, version: int) -> None:
        """An engine has loaded a version."""
        self.decided("load", version, *self._numbered("engine", engine_id))
        self._newest = max(self._newest, version)

    def weights_of(self, version: int) -> str:
        """What a trainer gives away as a version: its number, and how often trainers had gone back by then.

        A trainer that has gone back gives other weights the same numbers.
        """
        return f"{version}.{len(self._rollbacks)}"

    def says(self, digest: int, token: int, version: int, rollbacks: int, log_prob: float) -> None:
        """An engine that has the weights `version.rollbacks` has drawn a token after the text of a digest."""
        self.tokens_said += 1
        if self._digests:
            self.decided("sample", digest, token, version, log_prob)
        key = digest, token
        self._said[key] = (*self._said.get(key, ()), (version, rollbacks, float(np.float32(log_prob))))

    def _forget_tokens(self, below: int) -> None:
        """Forget the tokens that were sampled before a version: they are too old to be trained."""
        kept = (
            (key, all_said if oldest >= below else tuple([said for said in all_said if said[0] >= below]))
            for key, all_said in self._said.items()
            for oldest in [min(all_said)[0] if len(all_said) > 1 else all_said[0][0]]
        )
        # A new dict takes as much memory as its members, however many the old one once had.
        self._said = {key: said for key, said in kept if said}

    def call_begins(
        self, engine_id: str, request: GenerateRequest, version: int, verified: int | None
    ) -> None:
        """A session calls an engine that serves `version` and was last verified at `verified`."""
        name = _task_name()
        self.note(f"{name}: {engine_id} gets {len(request.input_ids)} tokens at version {version}")
        if request.request_id.endswith(CANARY_SUFFIX):
            if verified != version:
                self.fail(f"{engine_id} serves version {version} to a canary, verified is {verified}")
            return
        who = *self._numbered("trajectory", name), *self._numbered("engine", engine_id)
        if self._digests:
            self.decided("call", *who, version, request.max_new_tokens, request.input_ids.tobytes())
        if verified != version:
            self.fail(f"{engine_id} serves version {version}, verified is {verified}")
        if _is_answer(name):
            return
        self._unaccounted[name] += request.max_new_tokens > 0
        head = self._heads.get(root_of(name), {}).get(name)
        if head is None or caller_is_given_up.get()():
            return
        tokens = request.input_ids.tolist()
        # A call for rows alone leaves out the last token, which predicts nothing.
        kept = head[: len(tokens)] if request.max_new_tokens == 0 else head
        if tokens[: len(kept)] != kept:
            self.fail(f"{name}: a call of {len(tokens)} tokens does not continue the {len(head)} seen before")

    def request_is_refused_needlessly(self) -> None:
        """An engine refuses a request as wrong, and another one could accept it."""
        kind, _, name = _task_name().rpartition(" ")
        if kind in ("trajectory", "end of"):
            self.refused_needlessly.add(root_of(name))

    def call_is_made(self, request: GenerateRequest) -> Callable[[], None]:
        """A session makes a call; what this returns is to be called when the call reaches its engine."""
        if request.max_new_tokens > 0 or _is_answer(name := _task_name()):
            return lambda: None
        recoveries = self._recoveries[name.split()[-1]]
        recoveries.append("not reached")
        return lambda: recoveries.remove("not reached")

    def call_ends(
        self,
        request: GenerateRequest,
        chunks: Sequence[Chunk],
        finish: Finish | None,
        failure: EngineError | None = None,
    ) -> None:
        """A session's call is over; its next one must continue what is kept of it."""
        name, failed = _task_name(), failure is not None
        if _is_answer(name) or request.request_id.endswith(CANARY_SUFFIX):
            return
        if request.max_new_tokens == 0:
            how = type(failure).__name__ if failure else finish.reason if finish else "was left"
            self._recoveries[name.split()[-1]].append(how)  # its task may be the end of the trajectory
            return
        chunks = list(
            itertools.takewhile(_has_right_mask, chunks)
        )  # the session leaves a call at a wrong one
        sampled = [token for chunk in chunks for token in chunk.token_ids.tolist()]
        log_probs = [value for chunk in chunks for value in chunk.log_probs.tolist()]
        fit = next((i for i, value in enumerate(log_probs) if not math.isfinite(value)), len(log_probs))
        if finish is None:  # it may have been left at a stop string, within a chunk
            kept, stopped = _until_stop(request, sampled)
            if fit < len(kept):  # an answer that ends by itself is judged as a whole
                kept = [] if stopped else kept[:fit]
        else:  # it is judged as a whole
            right = fit == len(sampled) and check_partition(finish.version_spans, len(sampled))
            kept = sampled if right else []
        how = "failed" if failed else finish.reason if finish else "was left"
        routing = self._config.routing
        unused = (
            routing.merge == "replace" and not routing.flip_sample and len(sampled) < request.max_new_tokens
        )
        if unused and finish is not None and finish.reason == "abort" and finish.routing is not None:
            self.fail(f"{name}: {finish.routing.num_rows} rows of an aborted call are moved and never used")
        ended = len(sampled), len(kept), failed, finish is not None
        self.decided("call ends", *self._numbered("trajectory", name), *ended)
        self._unaccounted[name] -= finish is not None
        self.note(f"{name}: the call {how} after {len(sampled)} tokens, {len(kept)} kept")
        root = root_of(name)
        if not caller_is_given_up.get()() and _attempt.get() == self._attempts[root]:
            self._heads[root][name] = [*request.input_ids.tolist(), *kept]

    @property
    def saved_step(self) -> int:
        """The step of the newest checkpoint."""
        return self._saved

    @property
    def last_step(self) -> int:
        """The newest step of the trainer; 0 before the first."""
        return max([self._saved, *self._steps])

    @property
    def served_s(self) -> float:
        """Seconds during which some engine served, until now: the clock may have jumped since a turn."""
        since_s = self._serving_since_s
        return self._served_s + (0.0 if since_s is None else self.now() - since_s)

    def engines_serve(self, serve: bool) -> None:
        """Some engine serves from now on, or none does."""
        if serve == (self._serving_since_s is not None):
            return
        self._served_s = self.served_s
        self._serving_since_s = self.now() if serve else None

    def attempt_begins(self, remaining_s: float) -> AttemptLimit:
        """The agent loop of a trajectory starts from its prompt, with so much time."""
        root = _task_name()
        self.note(f"{root} starts")
        self.decided("admit", *self._numbered("trajectory", root))
        self._attempts[root] += 1
        _attempt.set(self._attempts[root])
        # What an earlier incarnation journalled of a call that ran is as old as the call, however it ended
        # later.
        for name in self._heads.pop(root, ()):
            self._unaccounted[name] += 1
        return AttemptLimit(self.served_s + remaining_s, self.now())

    def worker_is_unaware(self, for_s: float) -> None:
        """A rollout worker continues, and does not hear for so long that engines are held."""
        self._unaware_until_s = max(self._unaware_until_s, self.now() + for_s)

    def clock_jumps(self, by_s: float) -> None:
        """The clock is about to jump: messages to rollout workers that are under way arrive afterwards."""
        if self._config.num_workers:
            self._unaware_until_s = max(self._unaware_until_s, self.now() + _LINK_SLACK_S) + by_s

    def attempt_cancelled(self, limit: AttemptLimit, remaining_s: float) -> None:
        """The agent loop of a trajectory is cancelled: not by its limit while engines were held.

        Args:
            limit: What `attempt_begins` returned for this attempt; a worker that is cut off may still run
                one that another worker has made again.
            remaining_s: What it had left by its own clock.
        """
        limit_s, root = self._config.rollout.trajectory_timeout_s, _task_name()
        if limit.begun_s < self._unaware_until_s:  # its worker's clock went on while engines were held
            return
        early_s = limit.ends_s - self.served_s
        slack_s = _LINK_SLACK_S if self._config.num_workers else _ROUNDING_S
        if remaining_s <= 0.0 and early_s > slack_s:
            served_s = limit_s - early_s
            self.fail(
                f"{root} reached its limit of {limit_s} s in {served_s:.2f} s in which an engine served"
            )

    # -- the trainer --------------------------------------------------------------------------------------

    def restored(self, step: int) -> None:
        """A trainer has taken up a checkpoint; what was trained after it never was."""
        self.note(f"the trainer starts at step {step}")
        self.decided("restore", step)
        if step != self._saved:
            self.fail(f"the trainer starts at step {step}, saved was {self._saved}")
        if any(later > step for later in self._steps) or self._newest > step:
            self._rollbacks.append(step)
        self._steps = {done: names for done, names in self._steps.items() if done <= step}

    def saved(self, step: int) -> None:
        """The trainer has written a checkpoint."""
        if self.deaf:
            return
        self.note(f"checkpoint {step}")
        self.decided("save", step)
        self._saved = step
        if self._config.rollout.staleness_policy != "mask_tokens":  # under it a batch has older tokens too
            self._forget_tokens(step - self._config.rollout.max_staleness)

    def trains(self, batch: TrainBatch, version: int, step: int) -> None:
        """The trainer, at a version, consumes a batch in a step."""
        if self.deaf:
            return
        self.note(f"step {step}: {batch.num_trajectories} trajectories, {batch.num_tokens} tokens")
        if self._digests:
            self._decide_batch(batch, version, step)
        if (batch.trainer_version, step) != (version, version + 1):
            self.fail(f"step {step} of a trainer at {version}, the batch is for {batch.trainer_version}")
        names = frozenset(batch.trajectory_ids)
        if len(names) < batch.num_trajectories:
            self.fail(f"step {step} has a trajectory twice")
        for done, trained in self._steps.items():
            if twice := sorted(trained & names):
                self.fail(f"step {step} trains again what step {done} has: {twice}")
        if twice := sorted(name for name in names if name in self._trained):
            self.fail(f"step {step} trains again what an earlier checkpoint has: {twice}")
        self._steps[step] = names
        self._check_trees(batch)
        groups = len(np.unique(batch.group_index))
        if groups != self._config.trainer.groups_per_batch:
            self.fail(f"step {step} has {groups} groups")
        times = Counter[tuple[int, int]]()
        by_group = "group_reward" in self._config.rollout.reward
        for name, reward, bounds in zip(
            batch.trajectory_ids, batch.rewards.tolist(), pairwise(batch.offsets.tolist()), strict=True
        ):
            part = slice(*bounds)
            self._check_tokens(name, batch, part, version, times)
            sampled = batch.token_ids[part][batch.weight_versions[part] >= 0]
            if by_group and reward != np.float32(group_score(sampled)):
                self.fail(f"trajectory {name} has the reward {reward}, which its tokens did not get")
            if batch.routed_experts is not None and batch.routing_valid is not None:
                rows, valid = batch.routed_experts[part], batch.routing_valid[part]
                self._check_rows(name, batch, part, rows, valid, version)

    def _decide_batch(self, batch: TrainBatch, version: int, step: int) -> None:
        """Add a batch to the digest of decisions."""
        arrays = (
            *(batch.group_index, batch.rewards, batch.offsets, batch.token_ids, batch.loss_mask),
            *(batch.rollout_log_probs, batch.weight_versions, batch.routed_experts, batch.routing_valid),
        )
        self.decided("train", step, version, *self._numbered("trajectory", *batch.trajectory_ids))
        self.decided("batch", *(b"" if array is None else array.tobytes() for array in arrays))

    def _check_tokens(
        self, name: str, batch: TrainBatch, part: slice, version: int, times: Counter[tuple[int, int]]
    ) -> None:
        """`times`: how often each token after each text is trained in this batch."""
        tokens, versions = batch.token_ids[part], batch.weight_versions[part]
        trained = batch.loss_mask[part]
        if not trained.any():
            self.fail(f"trajectory {name} has nothing to train on")
            return
        oldest = int(versions[trained].min())
        if version - oldest > self._config.rollout.max_staleness:
            self.fail(f"trajectory {name}: a token of version {oldest} is trained at {version}")
        if (newest := int(versions.max())) > version and not self._rollbacks:
            self.fail(f"trajectory {name}: a token of version {newest} is trained at {version}")
        if (trained & (versions < 0)).any():
            self.fail(f"trajectory {name}: trained on tokens that were never sampled")
        digest = 0
        unknown = np.zeros(len(tokens), np.bool_) if batch.lag_unknown is None else batch.lag_unknown[part]
        for token, seen, log_prob, counts, is_unknown in zip(
            tokens.tolist(),
            versions.tolist(),
            batch.rollout_log_probs[part].tolist(),
            trained.tolist(),
            unknown.tolist(),
            strict=True,
        ):
            times[digest, token] += counts
            if times[digest, token] > len(self._said.get((digest, token), ())):
                self.fail(f"trajectory {name}: token {token} is trained more often than it was sampled")
                return
            if seen >= 0 and not self._was_said(name, digest, token, seen, log_prob, unknown=is_unknown):
                known = self._said.get((digest, token))
                self.fail(
                    f"trajectory {name}: no engine said token {token} at version {seen} "
                    f"{'(or later) ' if is_unknown else ''}with log-prob {log_prob} there; known: {known}"
                )
                return
            digest = zlib.crc32(token.to_bytes(8, "little"), digest)
        self._check_mask(name, batch, part)
        self._check_scores(name, batch, part)
        recorded = None if batch.temperatures is None else batch.temperatures[part]
        if recorded is None or (recorded[versions >= 0] != self._config.rollout.temperature).any():
            self.fail(f"trajectory {name}: the temperature of its sampled tokens is not recorded")

    def _check_scores(self, name: str, batch: TrainBatch, part: slice) -> None:
        """Compare the teacher's log-probs of sampled tokens with those that its engines give them."""
        teacher, scores = self._config.trainer.loss.teacher.model, batch.teacher_log_probs
        if teacher is None or scores is None:
            if teacher is not None or scores is not None:
                self.fail(f"trajectory {name}: it has scores of a teacher, or lacks them")
            return
        expected = scored_tokens(batch.token_ids[part].tolist(), 0, score_seed(teacher))
        trained = batch.loss_mask[part]
        if not np.array_equal(scores[part][trained], expected[trained]):
            self.fail(f"trajectory {name}: its tokens have scores that the teacher did not give them")

    def _check_mask(self, name: str, batch: TrainBatch, part: slice) -> None:
        """Compare the sampling masks of sampled tokens with those that engines give them."""
        rollout, sampled = self._config.rollout, batch.weight_versions[part] >= 0
        if not rollout.needs_masks or batch.sampling_mask is None:
            if rollout.needs_masks or batch.sampling_mask is not None:
                self.fail(f"trajectory {name}: sampling masks are missing, or there although none are needed")
            return
        expected = SamplingMask.of(
            [
                kept_tokens(token, log_prob, rollout.top_k) if is_sampled else []
                for token, log_prob, is_sampled in zip(
                    batch.token_ids[part].tolist(),
                    batch.rollout_log_probs[part].tolist(),
                    sampled.tolist(),
                    strict=True,
                )
            ]
        )
        found = batch.sampling_mask[part]
        if not np.array_equal(found.counts, expected.counts) or not np.array_equal(
            found.token_ids, expected.token_ids
        ):
            self.fail(f"trajectory {name}: its sampling masks are not those of its tokens")

    def _was_said(
        self, name: str, digest: int, token: int, version: int, log_prob: float, *, unknown: bool
    ) -> bool:
        """Whether some engine drew a token, by the very weights that the label names unless it is marked.

        Tokens may count as older than they are, and must be marked then: those of weights that a trainer has
        undone by going back count as the checkpoint's, and those of a call that ended without an account as
        old as the call. Exact labels may be marked too, where rows are of such weights.
        """
        for said, rollbacks, spoken in self._said.get((digest, token), ()):
            if log_prob != spoken or version > said:
                continue
            exact = version == said and min(self._rollbacks[rollbacks:], default=said) >= said
            undone = bool(self._rollbacks) and (version == said or version in self._rollbacks)
            unreported = self._config.weights.interrupt != "abort" and (
                version == said or self._is_unaccounted(name)
            )
            if undone or unreported if unknown else exact:
                return True
        return False

    def _is_unaccounted(self, name: str) -> bool:
        """Whether a call of a trajectory, or of one that it is a branch of, ended without an account."""
        ids = name.split(".")
        lines = (".".join(ids[:count]) for count in range(1, len(ids) + 1))
        return any(self._unaccounted[f"trajectory {line}"] > 0 for line in lines)

    def _check_trees(self, batch: TrainBatch) -> None:
        """What a branch read of the policy is trained in a trajectory that it is a branch of."""
        if self._config.rollout.staleness_policy == "mask_tokens":
            return
        trees: dict[str, list[tuple[str, slice]]] = defaultdict(list)
        for name, bounds in zip(batch.trajectory_ids, pairwise(batch.offsets.tolist()), strict=True):
            trees[root_of(name)].append((name, slice(*bounds)))
        for root, tree in trees.items():
            if all(name != root for name, _ in tree):
                self.fail(f"branches of {root} are trained without it")
            for name, part in tree:
                sampled, trained = batch.weight_versions[part] >= 0, batch.loss_mask[part]
                if not (read := np.flatnonzero(sampled & ~trained)).size:
                    continue
                owned = np.zeros(len(sampled), np.bool_)
                for other, its in tree:
                    if name.startswith(f"{other}."):
                        alike = _num_alike(batch.token_ids[its], batch.token_ids[part])
                        owned[:alike] |= batch.loss_mask[its][:alike]
                if trained[: read[-1]].any() or not owned[read].all():
                    self.fail(f"the tokens that {name} inherits are trained never or twice")

    def _check_rows(
        self,
        name: str,
        batch: TrainBatch,
        part: slice,
        experts: ExpertIdArray,
        valid: BoolArray,
        version: int,
    ) -> None:
        tokens, sampled = batch.token_ids[part][:-1], batch.weight_versions[part][1:]
        if valid[-1]:
            self.fail(f"trajectory {name}: the last token was never fed, but has a row")
        rows, valid = experts[:-1], valid[:-1]
        versions = versions_of_rows(rows, tokens, self._newest)
        if not np.array_equal(routing_rows(tokens, versions, FACTS)[valid], rows[valid]):
            self.fail(f"trajectory {name}: rows that no engine computes for these tokens and positions")
            return
        seen = versions[valid]
        if len(seen) and int(seen.max()) > self._newest:
            self.fail(f"trajectory {name}: rows of the versions {set(seen.tolist())} > {self._newest}")
        recoveries = self._recoveries.get(name, [])
        failed = sum(how not in _NO_FAILURES for how in recoveries)
        if failed < _MAX_RECOVERIES and (missing := np.count_nonzero(~valid[sampled >= 0])):
            self.fail(f"trajectory {name}: {missing} rows are missing; its recoveries: {recoveries}")
        # The mismatch of two programs is measured on tokens of the trainer's very weights: these must have
        # computed what the trainer replays before them, too.
        marked = (
            np.zeros(len(sampled), np.bool_) if batch.lag_unknown is None else batch.lag_unknown[part][1:]
        )
        compared = np.flatnonzero((sampled == version) & batch.loss_mask[part][1:] & ~marked)
        before = seen[: np.count_nonzero(valid[: compared[-1] + 1])] if len(compared) else seen[:0]
        if newer := sorted(set(before[before > version].tolist())):
            self.fail(f"trajectory {name}: tokens count as those of {version}, their rows are of {newer}")
        if self._config.weights.interrupt == "in_place" or self._rollbacks:
            return  # old rows stay beside new ones
        if self._config.routing.merge == "replace" and len(set(seen.tolist())) > 1:
            self.fail(f"trajectory {name}: rows of the versions {set(seen.tolist())} under replace")
        if self._config.weights.rolling:
            return  # a trajectory may move to an engine whose turn comes later
        if (np.diff(seen) < 0).any():
            self.fail(f"trajectory {name}: a row is older than one before it")
        predicts = valid & (sampled >= 0)
        if (versions[predicts] < sampled[predicts]).any():
            self.fail(f"trajectory {name}: a row is older than the token that it sampled")

    # -- the ledger ---------------------------------------------------------------------------------------

    def check_ledger(self, run_dir: Path, *, settled: int) -> None:
        """Compare its tables with what was seen; all steps up to `settled` have been settled.

        Rows of what is settled may be gone once a checkpoint has it. They were seen before.
        """
        if self.deaf:
            return
        rows, pending, folded, _ = _read_ledger(run_dir)
        trained: dict[int, set[str]] = defaultdict(set)
        frames: dict[str, str] = {}
        fates: dict[str, tuple[int, set[str]]] = {}
        listed: dict[str, set[str]] = {}
        self.decided("settle", settled, folded, *sorted(pending))
        for name, group, position, state, step, reason, stored, version, attempt, task in rows:
            if position is None:
                self.fail(f"trajectory {name} belongs to no group")
                continue
            if self._tasks_at.setdefault(position, task) != task:
                self.fail(f"position {position} had the task {self._tasks_at[position]}, and now has {task}")
            who = *self._numbered("trajectory", name), *self._numbered("group", group)
            fate = *self._numbered("state", state), *self._numbered("reason", reason)
            self.decided("state", *who, *fate, position, -1 if step is None else step, version, attempt)
            if state == "trained":
                trained[step].add(name)
            fates.setdefault(group, (position, set()))[1].add(reason if state == "dropped" else state)
            if state == "queued":
                frame = _frame_of(stored)
                if frames.setdefault(frame, name) != name:
                    self.fail(f"the trajectories {name} and {frames[frame]} are queued in one frame, {frame}")
                if not self._is_stored(run_dir, stored, listed):
                    self.fail(f"trajectory {name} is queued in {frame}, which is not there")
        for step, names in trained.items():
            known = self._steps.get(step)
            # A power cut undoes that it was folded.
            agrees = names == known if known is not None else all(name in self._trained for name in names)
            if step > settled or not agrees:
                self.fail(f"the ledger and the trainer disagree on what was trained in step {step}")
        unsettled = [step for step in self._steps if self._saved < step <= settled and step not in trained]
        if unsettled:
            self.fail(f"the ledger knows nothing of the steps {unsettled}")
        for group in self._fates.keys() - fates.keys():  # settled since, and folded into a count
            position, ends = self._fates[group]
            self._used.add(position)
            if "trained" in ends:
                if position in self._held:
                    self.fail(f"position {position} was trained twice, at last in group {group}")
                self._held.add(position)
        self._fates = fates
        names = {row[0] for row in rows}
        self._seen.update(names - self._names)
        self._forget_trajectories(self._names - names)
        self._names = names
        for step in [step for step in self._steps if step <= self._saved and step not in trained]:
            self._trained.update(self._steps.pop(step))
        unseen = folded - (len(self._seen) - len(names)) - self._unseen_before
        if unseen < 0:
            self.fail(f"{-unseen} trajectories are gone from the ledger")
        skipped = self._check_positions(pending) - self._skipped_before
        if skipped > (most := unseen // self._config.rollout.group_size):
            self.fail(f"{skipped} positions were skipped, expected at most {most}")

    def _forget_trajectories(self, names: Collection[str]) -> None:
        for name in names:
            self._heads.pop(f"trajectory {name}", None)
            self._attempts.pop(f"trajectory {name}", None)
            self._unaccounted.pop(f"trajectory {name}", None)
            self._recoveries.pop(name, None)

    def lose_power(self, run_dir: Path, lost: Collection[str]) -> None:
        """What the ledger does not know any more after a power cut never happened.

        Steps that a checkpoint contains stay trained: the ledger must know them.

        Args:
            run_dir: The folder of the run, after it.
            lost: The files that have lost something, as paths in it.
        """
        self.lost_frames.update(name.removeprefix("spool/") for name in lost if name.startswith("spool/"))
        if "metrics.jsonl" in lost:  # the line of a checkpoint's step is written again with more figures
            self.unrecorded.add(self._saved)
        rows, pending, folded, cursor = _read_ledger(run_dir)
        names = {row[0] for row in rows}
        self._seen.update(names)
        self._forget_trajectories(self._names - names)
        self._names = names
        self._unseen_before = folded - (len(self._seen) - len(names))
        self._fates, listed = {}, dict[str, set[str]]()
        for _, group, position, state, _, reason, stored, *_ in rows:
            # Frames are deleted once the ledger says that they were settled or their group was dropped, which
            # the cut may undo.
            finished = state == "queued" or (state == "in_flight" and stored)
            if finished and not self._is_stored(run_dir, stored, listed):
                self.lost_frames.add(_frame_of(stored))
            self._fates.setdefault(group, (position, set()))[1].add(reason if state == "dropped" else state)
        for position in (*range(cursor, self._num_positions), *(at for at, _ in self._fates.values())):
            self._used.discard(position)
            self._held.discard(position)
        self._tasks_at = {at: task for at, task in self._tasks_at.items() if at < cursor}
        self._num_positions = cursor
        self._skipped_before = self._check_positions(pending)

    def _is_stored(self, run_dir: Path, entry: bytes, listed: dict[str, set[str]]) -> bool:
        """Whether the frame that a row of the ledger names is there, as far as its node is.

        Each folder is listed once, into `listed`: to ask for each frame takes 5% of a soak.
        """
        stored = msgspec.msgpack.decode(entry, type=StoredTrajectory)
        if _frame_of(entry) in self.lost_frames:
            return True
        if stored.node in self.lost_nodes or stored.path.rpartition("/")[0] in self.wiped:
            return True
        path = stored.path if stored.node else f"{run_dir}/spool/{_frame_of(entry)}"
        folder, _, name = path.rpartition("/")
        if folder not in listed:
            listed[folder] = set(os.listdir(folder)) if os.path.isdir(folder) else set()
        return name in listed[folder]

    def check_records(self, run_dir: Path, *, settled: int) -> None:
        """Check that `metrics.jsonl` has one line for each step, whatever was killed or undone before."""
        path = run_dir / "metrics.jsonl"
        # Readers ignore what a power cut has left of a last line.
        lines = path.read_bytes().rpartition(b"\n")[0].splitlines() if path.exists() else []
        steps = [msgspec.json.decode(line)["step"] for line in lines]
        if [s for s in range(1, settled + 1) if s in steps or s not in self.unrecorded] != steps:
            self.fail(f"metrics.jsonl has lines of the steps {steps}, {settled} were trained")

    def _check_positions(self, pending: set[int]) -> int:
        """Each position is held by one group at most, used up, or pending.

        A group that a restart undid has not used it up.

        Returns:
            The number of positions of which nothing is known: their groups came and went between two looks.
        """
        holders: dict[int, list[str]] = defaultdict(list)
        used: set[int] = set()
        for group, (position, ends) in self._fates.items():
            self._num_positions = max(self._num_positions, position + 1)
            if ends & _HOLDING:
                holders[position].append(group)
            if ends != {"restart"} and position not in self._used:
                used.add(position)
        for position, groups in holders.items():
            if len(groups) > 1:
                self.fail(f"position {position} is held by the groups {groups}")
            if position in self._held:
                self.fail(f"position {position} was trained, and is held by group {groups[0]}")
            if position in pending:
                self.fail(f"position {position} is pending, but group {groups[0]} has it")
        waiting = {
            at for at in pending if at < self._num_positions and at not in used and at not in self._used
        }
        return self._num_positions - len(self._used) - len(used) - len(waiting)

    def check_folder(self, run_dir: Path) -> None:
        """What lies in the folder of a run that has ended is what its ledger knows of, and no more."""
        database = _connect(f"file:{run_dir / 'ledger.sqlite'}?mode=ro", uri=True)
        try:
            named = database.execute("SELECT stored FROM trajectories WHERE stored IS NOT NULL")
            owned = {_frame_of(stored) for (stored,) in named}
        finally:
            database.close()
        # The driver never learns that a worker that was cut off has ended: the next start deletes its frames,
        # and those on a node that does not answer at the end, or has not been asked since it failed to.
        files = (
            path
            for path in spooled_files(self._config, run_dir)
            if path.parent.name not in self.cut_off_folders
            and self.absent_until_s.get(path.parent.parent.name, 0.0) < self.now()
            and path.parent.parent.name not in self.unasked_nodes
        )
        frames = {f"{path.parent.name}/{path.name}" for path in files}
        if left := frames - owned:
            self.fail(f"frames without an owner are left: {sorted(left)}")
        versions = list((run_dir / "weights").glob("version_*"))
        # An engine that hangs may have one open until the next incarnation clears it away.
        hanging = self._config.engine.num_engines if self.met_faults.keys() & ENGINE_FAULTS else 0
        if len(versions) > publisher.KEEP_VERSIONS + hanging:
            self.fail(f"published versions are left: {sorted(path.name for path in versions)}")


def _until_stop(request: GenerateRequest, sampled: list[int]) -> tuple[list[int], bool]:
    """The tokens until the first that completes a stop string, perhaps together with the last one before.

    Also returns whether there is one.
    """
    words = [str(request.input_ids[-1]), *map(str, sampled)]
    for count in range(1, len(sampled) + 1):
        pair = " ".join(words[count - 1 : count + 1])
        if any(stop in pair for stop in request.sampling.stop):
            return sampled[:count], True
    return sampled, False


def versions_of_rows(rows: ExpertIdArray, tokens: Int32Array, newest: int) -> Int32Array:
    """Return the version of each row, read from its first expert; see `routing_rows`.

    A row encodes it modulo the number of experts, so it is the last such version up to a
    few after the newest.
    """
    first = rows[:, 0, 0].astype(np.int64) - 3 * np.arange(len(tokens)) - 5 * tokens.astype(np.int64)
    end = newest + _AHEAD
    return (end - (end - first * _INVERSE_OF_7) % FACTS.num_experts).astype(np.int32)


def _num_alike(one: Int32Array, other: Int32Array) -> int:
    """With how many equal tokens both begin."""
    count = min(len(one), len(other))
    differs = np.flatnonzero(one[:count] != other[:count])
    return int(differs[0]) if differs.size else count


def spooled_files(config: Config, run_dir: Path) -> Iterator[Path]:
    """Yield the files of finished trajectories, in the run's folder and on its nodes."""
    places = [run_dir / "spool"]
    if (spool_dir := config.queue.spool_dir) is not None:
        places += node_folder(spool_dir, run_dir).glob("*")
    for place in places:
        yield from (path for path in place.glob("*/*") if path.is_file())


def _read_ledger(run_dir: Path) -> tuple[list[tuple[Any, ...]], set[int], int, int]:
    """Return the rows of trajectories, pending positions, the number of folded rows, and the cursor."""
    if not (run_dir / "ledger.sqlite").exists():  # a power cut came before its first commit
        return [], set(), 0, 0
    database = _connect(f"file:{run_dir / 'ledger.sqlite'}?mode=ro", uri=True)
    try:
        rows = database.execute(
            "SELECT t.trajectory_id, t.group_id, g.position, t.state, t.step, t.reason, t.stored, "
            "g.weight_version, t.attempt, g.task_id "
            "FROM trajectories t LEFT JOIN groups g USING (group_id) ORDER BY t.trajectory_id"
        ).fetchall()
        pending = {position for (position,) in database.execute("SELECT position FROM pending")}
        ((folded,),) = database.execute("SELECT coalesce(sum(number), 0) FROM folded")
        ((cursor,),) = database.execute(
            "SELECT max(coalesce((SELECT max(position) + 1 FROM groups), 0), "
            "coalesce((SELECT value FROM meta WHERE key = 'cursor'), 0))"
        )
    finally:
        database.close()
    return rows, pending, folded, cursor


def _frame_of(stored: bytes) -> str:
    """Return the file that a row of the ledger refers to, relative to the spool."""
    path = Path(msgspec.msgpack.decode(stored, type=StoredTrajectory).path)
    return f"{path.parent.name}/{path.name}"


def _has_right_mask(chunk: Chunk) -> bool:
    return chunk.mask is None or bool(chunk.mask.keeps(chunk.token_ids).all())


def _is_answer(name: str) -> bool:
    """Whether a task gets an answer of an evaluation, which is never trained."""
    return name.startswith("answer ")


def _task_name() -> str:
    if name := reward_source.get(""):
        return name
    task = asyncio.current_task()
    return task.get_name() if task is not None else "no task"
