"""What an agent loop talks to: `Session`, and the `Turn` that each call of the policy gives back.

A loop sees a conversation; the session sees tokens. Weight updates, interruptions, resumes and engines that
die happen below this line and never show: `generate` returns when the turn is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Literal, Protocol

import msgspec
import numpy as np

from async_rl.types import Float32Array, Int32Array, Task


class Turn(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One assistant turn, whole, however often it was interrupted while it was sampled."""

    text: str
    """Decoded; special tokens are left out except what the chat format needs (tool-call tags stay)."""
    token_ids: Int32Array  # [n]
    finish_reason: Literal["stop", "length"]
    weight_versions: tuple[int, ...] = ()
    """That sampled it, ascending."""
    num_interruptions: int = 0
    """How often a weight update or a failure cut it short."""
    engine_s: float = 0.0
    """Seconds in engine calls, since the last restart of the driver."""
    rollout_log_probs: Float32Array = np.empty(0, np.float32)  # [n], nats; not in scripted turns


class Session(Protocol):
    """One trajectory in the making. A loop calls `start` once, then `generate` and `add_messages` in turns.

    Calls out of place (a turn while another is being written, anything after the end) raise `RuntimeError`
    before they change anything.

    Example:
        >>> session.start(task.messages)
        >>> turn = await session.generate()
        >>> session.add_messages([{"role": "user", "content": "Are you sure?"}])
        >>> turn = await session.generate(max_new_tokens=64)
    """

    task: Task
    trajectory_id: str
    """Unique for ever, the same after a restart: a key for what a loop keeps outside."""
    messages: list[dict[str, Any]]
    """The conversation so far, as text; `generate` appends the assistant's message itself."""
    tool_timeout_s: float

    @property
    def sampling(self) -> dict[str, float]:
        """`temperature`, `top_p` and `top_k` by which the policy is sampled: the config's, always."""
        ...

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token, for people: special ones included."""
        ...

    @property
    def chat_template(self) -> str:
        """The text of the model's chat template: it tells the format of tool calls."""
        ...

    @property
    def remaining_tokens(self) -> int:
        """Tokens left in `rollout.max_context_tokens`."""
        ...

    @property
    def num_turns(self) -> int:
        """Turns of the policy so far."""
        ...

    @property
    def remaining_turns(self) -> int:
        """Turns left of `rollout.max_turns`."""
        ...

    @property
    def remaining_s(self) -> float:
        """Seconds left of `rollout.trajectory_timeout_s`."""
        ...

    @property
    def remaining_branches(self) -> int:
        """Branches left of `rollout.max_branches`."""
        ...

    def start(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> None:
        """Render the prompt with the chat template.

        Args:
            messages: Chat messages, the policy's turn next.
            tools: JSON schemas of the tools on offer (`{"type": "function", "function": {...}}`).

        Raises:
            PromptTooLong: The prompt leaves no room to generate.
        """
        ...

    async def generate(
        self,
        *,
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
        on_text: Callable[[str], None] | None = None,
    ) -> Turn:
        """Let the policy write one turn. After a turn that was cut short, with nothing added, it goes on.

        Args:
            max_new_tokens: Most tokens of this turn, over all its resumes; None takes
                `rollout.max_new_tokens`.
            stop: Strings that end the turn as well.
            on_text: Told of the turn's text as it grows, across interruptions. An engine's answer that turns
                out to be wrong is sampled anew, so that the turn's own text has the last word.

        Raises:
            OutOfTurns: There were `rollout.max_turns`. The trajectory ends as it is.
        """
        ...

    def add_messages(self, messages: Sequence[dict[str, Any]]) -> None:
        """Append tool results or user turns; the policy reads them and is not trained on them.

        What is added between two turns is rendered together, however many calls it takes.

        Raises:
            PromptTooLong: They do not fit. The trajectory ends as it is.
        """
        ...

    def add_tool_result(
        self,
        content: Any,
        *,
        name: str | None = None,
        tool_call_id: str | None = None,
        error: bool = False,
    ) -> None:
        """Append a tool's result (text, or what JSON can say) and count the call, and whether it failed."""
        ...

    def record_tool_call(
        self, *, error: bool, tool: str = "unnamed", seconds: float = 0.0, waited_s: float = 0.0
    ) -> None:
        """Count one tool call in the outcome and the metrics, and whether it failed.

        Args:
            error: It did.
            tool: Its name; one of a few, never what the policy wrote: it becomes a label.
            seconds: It took.
            waited_s: Before it began, for others to end.
        """
        ...

    def record_request(self, result: str, ignored: Sequence[str] = ()) -> None:
        """Count a request over OpenAI's API.

        Args:
            result: `answered`, `repeated`, `another` or `refused`.
            ignored: Parameters that were not heeded; names of a few, they become labels.
        """
        ...

    def annotate(self, **values: Any) -> None:
        """Note something of the newest turn, for people: JSON, at most 4096 bytes a turn."""
        ...

    def branch(self) -> Session:
        """A trajectory of its own that begins with everything up to here, and lives in its block.

        It is one more member of the group, with its own reward. What it inherits it reads; the tokens are
        trained once, where they were sampled. This session goes on beside it as it likes. A block in which
        nothing is sampled makes no trajectory; one that raises takes its trajectory back, and the branches
        of it. Running out of tokens or turns ends the block like a `return`.

        Example:
            >>> async with session.branch() as other:
            ...     other.add_messages([{"role": "user", "content": "Another way?"}])
            ...     await other.generate()

            >>> async def play(session):
            ...     async with session:
            ...         await session.generate()
            >>> await asyncio.gather(*(play(s) for s in (session, session.branch(), session.branch())))
        """
        ...

    def conversation(self) -> Session:
        """Another conversation of the same attempt, which begins with nothing: a sub-agent's, for example.

        For the rest it is as a branch: one of `rollout.max_branches`, a member of the group, alive in its
        block.

        Example:
            >>> async with session.conversation() as helper:
            ...     helper.start([{"role": "user", "content": "Summarise this: ..."}])
            ...     await helper.generate()
        """
        ...

    def share_reward(self) -> None:
        """From now on what is said in this session last is what all of this attempt are rewarded for.

        The reward function then sees one completion, this one's, for each of them.
        """
        ...

    async def __aenter__(self) -> Session:
        """See `branch`. The session that a loop was given lives already; its block is for symmetry."""
        ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        """See `branch`."""
        ...
