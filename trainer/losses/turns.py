"""The turns of a batch, and the return of each: its reward and the discounted rewards of later turns.

```
 tokens     prompt | turn 0 | tool | turn 1 | tool | turn 2
 rewards             r0              r1              r2 + reward of the conversation
 returns             r0 + g·R1       r1 + g·R2       R2
```
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from async_rl.types import BoolArray, Float32Array, Int32Array, Int64Array


class Turns(NamedTuple):
    """Runs of sampled tokens, which the policy wrote between two contexts. `[U]` each, in order."""

    trajectory: Int64Array
    """The trajectory of each turn."""
    start: Int64Array
    """The index in the batch of its first token."""
    end: Int64Array
    """The index after its last token."""


def find_turns(weight_versions: Int32Array, offsets: Int64Array) -> Turns:
    """Return the turns of a batch.

    Masked tokens count as well: a token that is too stale, or that a sibling branch trains, was still
    generated.

    Args:
        weight_versions: `[S]`, -1 for tokens that were not sampled.
        offsets: `[N + 1]`, the bounds of the trajectories; none is empty.
    """
    sampled = weight_versions >= 0
    first = sampled & ~np.roll(sampled, 1)
    last = sampled & ~np.roll(sampled, -1)
    bounds = offsets[:-1]
    first[bounds] = sampled[bounds]  # a turn ends with its trajectory
    last[offsets[1:] - 1] = sampled[offsets[1:] - 1]
    start, end = np.flatnonzero(first), np.flatnonzero(last) + 1
    return Turns(np.searchsorted(offsets, start, side="right") - 1, start, end)


def turn_of_tokens(turns: Turns, count: int) -> Int64Array:
    """Return the turn of each of `count` tokens, -1 where a token is of none."""
    index = np.full(count, -1)
    lengths = turns.end - turns.start
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    index[np.repeat(turns.start, lengths) + within] = np.repeat(np.arange(len(lengths)), lengths)
    return index


def longest_turns(turns: Turns, count: int) -> Int64Array:
    """Return the length in tokens of each trajectory's longest turn, `[N] int64`; 0 where there is none."""
    longest = np.zeros(count, np.int64)
    np.maximum.at(longest, turns.trajectory, turns.end - turns.start)
    return longest


def has_trained_tokens(turns: Turns, loss_mask: BoolArray) -> BoolArray:
    """Return which turns have a token that is trained on, `[U]`; others are not compared with anything.

    Args:
        turns: The turns of a batch.
        loss_mask: `[S]`, False also for turns that belong to the trajectory that this one is a branch of.
    """
    trained = np.concatenate([[0], np.cumsum(loss_mask)])
    found: BoolArray = trained[turns.end] > trained[turns.start]
    return found


def turn_returns(
    turns: Turns, rewards: Float32Array, positions: Int64Array, values: Float32Array, discount: float
) -> Float32Array:
    """Return the discounted sum of the rewards from each turn on, `[U] float32`.

    Args:
        turns: The turns of a batch.
        rewards: `[N]`, the whole reward of each trajectory, rewards of its turns included. What is not a
            turn's own is of the last turn.
        positions: `[R]`, the index in the batch of the last token of a turn with a reward of its own.
        values: `[R]`, these rewards.
        discount: The discount per turn, written g above.

    Source: the return of reinforcement learning, Sutton and Barto, "Reinforcement Learning" (2018), equation
    3.8, with a turn of the policy as the action.
    """
    own = np.zeros(len(turns.start))
    np.add.at(own, np.searchsorted(turns.start, positions, side="right") - 1, values)
    rest = rewards.astype(np.float64)
    np.subtract.at(rest, turns.trajectory, own)
    returns = np.zeros(len(own))
    for turn in reversed(range(len(own))):
        is_last = turn + 1 == len(own) or turns.trajectory[turn + 1] != turns.trajectory[turn]
        later = rest[turns.trajectory[turn]] if is_last else discount * returns[turn + 1]
        returns[turn] = own[turn] + later
    return returns.astype(np.float32)
