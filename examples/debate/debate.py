"""Two agents, one policy: a solver answers, a critic looks for mistakes, the solver answers again.

```
 solver   question ─► answer ───────────────────────► critique ─► answer again
 critic                 └─► question, answer ─► critique ──┘
```

They are two conversations of one attempt, and so two trajectories of its group. Both are rewarded for the
solver's last answer: the critic learns to say what helps.
"""

from __future__ import annotations

from agent_loops.base import AgentLoop
from async_rl.rollout.session.api import Session
from async_rl.types import StopReason, Task

CRITIC = "You check answers. Say what is wrong with them, or that they are right, in one sentence."


class Debate(AgentLoop):
    """Answers once, then repeats rounds of critique and revised answer."""

    def __init__(self, rounds: int = 1) -> None:
        self.rounds = rounds

    async def run(self, task: Task, session: Session) -> StopReason | None:
        """Plays one debate; both agents are rewarded for the solver's final answer."""
        session.share_reward()
        question = str(task.messages[-1]["content"])
        session.start(task.messages)
        answer = await session.generate()
        async with session.conversation() as critic:
            critic.start(
                [
                    {"role": "system", "content": CRITIC},
                    {"role": "user", "content": f"{question}\nThe answer was: {answer.text}"},
                ]
            )
            for left in reversed(range(self.rounds)):
                critique = await critic.generate()
                session.add_messages(
                    [{"role": "user", "content": f"{critique.text}\n{question} Answer again."}]
                )
                answer = await session.generate()
                if left:
                    critic.add_messages([{"role": "user", "content": f"Now it is: {answer.text}"}])
        return None
