"""An environment of OpenEnv: find a number with the answers `higher` and `lower`.

pip install openenv==0.4.1
uvicorn examples.environments.number_server:app --port 8000
"""

from __future__ import annotations

import random
from typing import Any

from openenv.core.env_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

LARGEST = 100
MAX_GUESSES = 8


class Guess(Action):
    """What the policy writes."""

    guess: int | str


class Hint(Observation):
    """What it reads."""

    hint: str


class Numbers(Environment):
    """One episode: a number that depends on the seed."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Hint:
        """Choose a number."""
        self._number = random.Random(seed).randint(1, LARGEST)
        self._state = State(episode_id=episode_id)
        return Hint(hint=f"I think of a number from 1 to {LARGEST}.")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        """Compare a guess with it."""
        self._state.step_count += 1
        done = self._state.step_count == MAX_GUESSES
        try:
            guess = int(action.guess)
        except ValueError:
            return Hint(hint="Write a number.", reward=0.0, done=done)
        if guess == self._number:
            return Hint(hint="Right.", reward=1.0, done=True)
        return Hint(hint="higher" if guess < self._number else "lower", reward=0.0, done=done)

    @property
    def state(self) -> State:
        """The number of guesses."""
        return self._state


app = create_app(Numbers, Guess, Hint, env_name="numbers", max_concurrent_envs=256)
