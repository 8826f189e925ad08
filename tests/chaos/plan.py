"""Draws a plan of faults from a seed. Pure, so that a seed determines a readable plan."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Final, Literal

import msgspec

Victim = Literal["driver", "trainer rank", "engine", "engine actor"]

DECK: Final[tuple[tuple[Victim, str], ...]] = (
    ("trainer rank", "SIGKILL"),
    ("engine", "SIGKILL"),
    ("driver", "SIGKILL"),
    ("trainer rank", "SIGSTOP"),
    ("engine", "SIGSTOP"),
    ("driver", "SIGSTOP"),
    ("engine actor", "SIGKILL"),
)
"""Every kind occurs once before one is repeated."""


class Blow(msgspec.Struct, frozen=True, kw_only=True):
    """The kill or stop of one process."""

    victim: Victim
    how: str
    """SIGKILL or SIGSTOP."""
    after_step: bool
    """Whether the run first completes a step, or is hit while it still recovers."""
    delay_s: float
    """Delay from that moment, seconds."""
    pick: float
    """Selects one of the candidates; in [0, 1)."""
    lasts_s: float
    """A stopped driver is resumed after this time; other stopped processes are left to the run."""


def blows(seed: int) -> Iterator[Blow]:
    """Yields an endless plan."""
    rng = random.Random(seed)
    while True:
        for victim, how in rng.sample(DECK, len(DECK)):
            yield Blow(
                victim=victim,
                how=how,
                after_step=rng.random() < 0.75,
                delay_s=rng.uniform(0.0, 4.0),
                pick=rng.random(),
                lasts_s=rng.uniform(2.0, 8.0),
            )


def last(seed: int) -> Blow:
    """Returns the last blow of each plan: it kills the driver, which is then restarted for its last steps."""
    return Blow(
        victim="driver",
        how="SIGKILL",
        after_step=True,
        delay_s=random.Random(seed).uniform(0.0, 4.0),
        pick=0.0,
        lasts_s=0.0,
    )
