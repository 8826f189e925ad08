"""Draws a plan of faults from a seed. Pure, so that a seed determines a readable plan."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Final, Literal

import msgspec

Victim = Literal[
    "driver", "trainer rank", "engine", "engine actor", "rollout worker", "disk", "reward server"
]

Kind = tuple[Victim, str]
"""A victim and what happens to it: a signal, or a fault as the simulation names it."""

DECK: Final[tuple[Kind, ...]] = (
    ("trainer rank", "SIGKILL"),
    ("engine", "SIGKILL"),
    ("driver", "SIGKILL"),
    ("trainer rank", "SIGSTOP"),
    ("engine", "SIGSTOP"),
    ("driver", "SIGSTOP"),
    ("engine actor", "SIGKILL"),
    ("rollout worker", "SIGKILL"),
    ("rollout worker", "SIGSTOP"),
    ("rollout worker", "delay_worker"),
    ("engine", "stuck_payload"),
    ("engine", "too_busy"),
    ("engine", "no_descriptors"),
    ("driver", "no_descriptors"),
    ("disk", "disk_full"),
    ("reward server", "SIGKILL"),
)
"""Every kind occurs once before one is repeated."""


class Blow(msgspec.Struct, frozen=True, kw_only=True):
    """One fault of one process, or of the run's disk."""

    victim: Victim
    how: str
    """SIGKILL, SIGSTOP, or the name of a fault in `verification.simulation.faults`."""
    after_step: bool
    """Whether the run first completes a step, or is hit while it still recovers."""
    delay_s: float
    """Delay from that moment, seconds."""
    pick: float
    """Selects one of the candidates; in [0, 1)."""
    lasts_s: float
    """How long the fault lasts at least, seconds."""
    resumes: bool = True
    """Whether an engine that is stopped in the middle of a payload is resumed by the harness; other stopped
    processes than the driver are always left to the run."""

    @property
    def kind(self) -> Kind:
        """What is done to whom."""
        return self.victim, self.how


def blows(seed: int, kinds: tuple[Kind, ...] = DECK) -> Iterator[Blow]:
    """Yield an endless plan of these kinds."""
    rng = random.Random(seed)
    while True:
        for victim, how in rng.sample(kinds, len(kinds)):
            yield Blow(
                victim=victim,
                how=how,
                after_step=rng.random() < 0.75,
                delay_s=rng.uniform(0.0, 4.0),
                pick=rng.random(),
                lasts_s=rng.uniform(2.0, 8.0),
                resumes=rng.random() < 0.5,
            )


def last(seed: int) -> Blow:
    """Return the last blow of each plan: it kills the driver, which is then restarted for its last steps."""
    delay_s = random.Random(seed).uniform(0.0, 4.0)
    return Blow(victim="driver", how="SIGKILL", after_step=True, delay_s=delay_s, pick=0.0, lasts_s=0.0)
