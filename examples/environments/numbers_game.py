"""An environment of verifiers, `GymEnv`, with a game: find a number with the answers `higher` and `lower`."""

from __future__ import annotations

import random
from typing import Any

import verifiers

LARGEST = 100
MAX_GUESSES = 8


class Numbers:
    """One episode: a number that depends on the seed."""

    def reset(self, seed: int) -> str:
        """Choose a number."""
        self._number = random.Random(seed).randint(1, LARGEST)
        return f"I think of a number from 1 to {LARGEST}."

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        """Compare a guess with it."""
        try:
            guess = int(action)
        except ValueError:
            return "Write a number.", 0.0, False, {}
        if guess == self._number:
            return "Right.", 1.0, True, {}
        return "higher" if guess < self._number else "lower", 0.0, False, {}


def load_environment(num_train_episodes: int = 8) -> verifiers.Environment:
    """Return the environment, as verifiers loads it."""
    return verifiers.GymEnv(
        env_cls=Numbers,
        num_train_episodes=num_train_episodes,
        num_eval_episodes=2,
        max_episode_steps=MAX_GUESSES,
        system_prompt="Find a number. Answer with your guess alone.",
    )
