"""The base class of agent loops: how one task becomes one conversation."""

from __future__ import annotations

from abc import ABC, abstractmethod

from async_rl.rollout.session.api import Session
from async_rl.types import StopReason, Task


class AgentLoop(ABC):
    """Runs one task as a conversation between the policy and its environment.

    A run makes one instance, with `rollout.agent_loop_args` as keyword arguments, and calls `run` for many
    trajectories concurrently, so the state of one trajectory belongs in local variables. An exception fails
    that trajectory alone; its outcome records it.

    A loop that is also an async context manager is entered before its first trajectory and exited at the end
    of the run. It holds the connections and processes that all trajectories share. `async-rl check` prints
    the sentences that an optional method `check(chat_template)` returns. A loop that opens files,
    connections or pipes for each trajectory sets `descriptors_per_trajectory`: the limit of open files is
    checked before a start. So is `fixed_port`, a port that only one process of a node can serve at, and
    with `has_tools` whether the chat template shows the policy its tools. Where rollout workers run the loop,
    the driver enters what an optional method `serve_workers()` returns, an async context manager, around the
    workers; they make their loops with the arguments that it yields.

    Example:
        A loop that asks the policy to check its own answer. In `check_twice.py` beside the config, it is
        `rollout.agent_loop: check_twice:CheckTwice`, with `rollout.agent_loop_args: {max_checks: 3}`.

        >>> class CheckTwice(AgentLoop):
        ...     def __init__(self, max_checks=1):
        ...         self.max_checks = max_checks
        ...
        ...     async def run(self, task, session):
        ...         session.start(task.messages)
        ...         turn = await session.generate()
        ...         for _ in range(self.max_checks):
        ...             if turn.finish_reason == "length" or "sure" in turn.text:
        ...                 break
        ...             session.add_messages([{"role": "user", "content": "Are you sure?"}])
        ...             turn = await session.generate(max_new_tokens=64)
        >>> from agent_loops.testing import make_task, play
        >>> (await play(CheckTwice(), make_task(), "5.", "I am sure.")).text
        'I am sure.'
    """

    @abstractmethod
    async def run(self, task: Task, session: Session) -> StopReason | None:
        """Run one trajectory to its end.

        Args:
            task: The task, from an example of the dataset.
            session: The conversation so far, and the interface to continue it.

        Returns:
            Why the trajectory ended, if the loop knows better than the session (`max_turns`); None otherwise.
        """
