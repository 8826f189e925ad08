"""Gates of a curriculum (`data.curriculum.gate`): how many tasks are drawn before a task may be."""

from __future__ import annotations

from async_rl.types import Task


def by_length(task: Task, first: int, per_draw: float) -> float:
    """Let in longer and longer prompts.

    Args:
        task: The task.
        first: The characters of the longest prompt that is let in at once.
        per_draw: By how many characters each draw raises that.

    Example:
        >>> task = Task(task_id="a", messages=[{"role": "user", "content": "x" * 300}])
        >>> by_length(task, first=100, per_draw=0.5)
        400.0
    """
    length = sum(len(str(message.get("content", ""))) for message in task.messages)
    return max(0.0, (length - first) / per_draw)
