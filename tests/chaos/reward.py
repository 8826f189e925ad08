"""A reward that an untrained model earns in part."""

from async_rl.types import Completion, Task


def share_of_digits(task: Task, completion: Completion) -> float:
    """Returns the share of digits in the answer."""
    return sum(c.isdigit() for c in completion.text) / max(1, len(completion.text))
