"""What is done to whom, drawn from a seed: pure, so that a seed is a plan that can be read."""

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
"""Every kind comes once before one comes again."""


class Blow(msgspec.Struct, frozen=True, kw_only=True):
    """One process is killed or stopped."""

    victim: Victim
    how: str
    """SIGKILL or SIGSTOP."""
    after_step: bool
    """Whether the run is first let do a step, or is struck while it still recovers."""
    delay_s: float
    """From then on."""
    pick: float
    """In [0, 1): which of the candidates."""
    lasts_s: float
    """A stopped driver goes on after this; who is stopped otherwise is left to the run."""


def blows(seed: int) -> Iterator[Blow]:
    """An endless plan."""
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
    """The blow that ends each plan: a killed driver, started again to do its last steps in peace."""
    return Blow(
        victim="driver",
        how="SIGKILL",
        after_step=True,
        delay_s=random.Random(seed).uniform(0.0, 4.0),
        pick=0.0,
        lasts_s=0.0,
    )
