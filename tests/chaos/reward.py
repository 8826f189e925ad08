"""A reward that an untrained model earns some of."""

from async_rl.types import Completion, Task


def share_of_digits(task: Task, completion: Completion) -> float:
    """How much of the answer is digits."""
    return sum(c.isdigit() for c in completion.text) / max(1, len(completion.text))
