"""The interface of agent loops: `Session`, and the `Turn` that each call of the policy returns.

A loop sees a conversation; the session sees tokens. Weight updates, interruptions, resumes and engine
failures happen below this interface and are invisible above it: `generate` returns when the turn is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Literal, Protocol

import msgspec
import numpy as np

from async_rl.types import Float32Array, Int32Array, Task


class Turn(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One complete assistant turn, however often it was interrupted while it was sampled."""

    text: str
    """The decoded text, without special tokens except the tags of thoughts and tool calls."""
    token_ids: Int32Array  # [n]
    finish_reason: Literal["stop", "length"]
    weight_versions: tuple[int, ...] = ()
    """The versions that sampled it, ascending."""
    num_interruptions: int = 0
    """How often a weight update or a failure interrupted it."""
    engine_s: float = 0.0
    """Seconds in engine calls, since the last restart of the driver."""
    rollout_log_probs: Float32Array = np.empty(0, np.float32)  # [n], nats; not in scripted turns


class Session(Protocol):
    """One trajectory in the making. A loop calls `start` once, then `generate` and `add_messages`
    alternately.

    Misplaced calls (a turn while another is being written, any call after the end) raise `RuntimeError`
    before they change anything.

    Example:
        >>> session.start(session.task.messages)
        >>> turn = await session.generate()
        >>> session.add_messages([{"role": "user", "content": "Are you sure?"}])
        >>> turn = await session.generate(max_new_tokens=64)
    """

    task: Task
    trajectory_id: str
    """Globally unique and the same after a restart: a key for data that a loop keeps elsewhere."""
    status: str
    """What the attempt is doing, in words, which the error of a time limit shows; its branches share it."""

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation so far, as text; `generate` appends the assistant's message itself."""
        ...

    @property
    def tool_timeout_s(self) -> float:
        """The time limit of one tool call."""
        ...

    @property
    def sampling(self) -> dict[str, float]:
        """`temperature`, `top_p` and `top_k` with which the policy is sampled, always from the config."""
        ...

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token for display, including special tokens."""
        ...

    @property
    def chat_template(self) -> str:
        """The text of the model's chat template, which shows the format of tool calls."""
        ...

    @property
    def remaining_tokens(self) -> int:
        """Tokens left in `rollout.max_context_tokens`.

        Messages of more than 16 KB are tokenised by `generate`, in a thread, or when this is read, which
        blocks the event loop for about a second per megabyte.
        """
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
        """Seconds left of `rollout.trajectory_timeout_s`; time in which no engine serves does not count."""
        ...

    @property
    def remaining_branches(self) -> int:
        """Branches left of `rollout.max_branches`."""
        ...

    async def count_tokens(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = (), *, after: bool
    ) -> int:
        """Return how many tokens the policy would read in all, without reading them.

        Args:
            messages: Messages as for `start`, or `add_messages`.
            tools: JSON schemas of tools as for `start`.
            after: Whether the messages follow what was said and read so far, or begin a conversation.
        """
        ...

    def start(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> None:
        """Render the prompt with the chat template.

        Args:
            messages: Chat messages, after which it is the policy's turn.
            tools: JSON schemas of the available tools (`{"type": "function", "function": {...}}`).

        Raises:
            PromptTooLong: The prompt leaves no tokens for a turn; `generate` raises it for a prompt that is
                longer than 16 KB, but might fit.
        """
        ...

    async def generate(
        self,
        *,
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
        on_text: Callable[[str], None] | None = None,
    ) -> Turn:
        """Let the policy write one turn. If the last turn was cut short and nothing was added, continue it.

        Args:
            max_new_tokens: The most tokens of this turn, over all its resumes; None takes
                `rollout.max_new_tokens`.
            stop: Additional strings that end the turn, with the token that completes one of them.
            on_text: Receives the turn's text as it grows, across interruptions. An invalid answer of an
                engine is discarded and sampled anew, so only the text of the returned turn is final.

        Raises:
            OutOfTurns: The session has had `rollout.max_turns`. The trajectory ends as it is.
            PromptTooLong: `rollout.max_context_tokens` are used up. The trajectory ends as it is.
            ValueError: `max_new_tokens` is less than 1, or `stop` has an empty string.
        """
        ...

    def add_messages(self, messages: Sequence[dict[str, Any]]) -> None:
        """Append tool results or user messages; the policy reads them and is not trained on them.

        Messages between two turns are rendered together, even if they are added by several calls.

        Raises:
            PromptTooLong: They do not fit, and are left out. The trajectory ends as it is. `generate` raises
                it once these calls have more than 16 KB together; it leaves out the first that does not fit
                and all later ones.
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
        """Append a tool's result (text or a JSON value) and count the call, and whether it failed."""
        ...

    def record_tool_call(
        self, *, error: bool, tool: str = "unnamed", seconds: float = 0.0, waited_s: float = 0.0
    ) -> None:
        """Count one tool call in the outcome and the metrics, and whether it failed.

        Args:
            error: Whether the call failed.
            tool: The tool's name, which becomes a label: one of a few, never text that the policy wrote.
            seconds: How long the call took.
            waited_s: How long it waited for other calls before it began.
        """
        ...

    def record_request(self, result: str, ignored: Sequence[str] = ()) -> None:
        """Count a request to the OpenAI-compatible API.

        Args:
            result: `answered`, `repeated`, `another` or `refused`.
            ignored: Names of ignored parameters, which become labels: a few, never arbitrary text.
        """
        ...

    def annotate(self, **values: Any) -> None:
        """Add metadata to the newest turn, for display: JSON, at most 4096 bytes for each turn."""
        ...

    def reward_turn(self, reward: float) -> None:
        """Add to the reward of the newest turn; the trajectory's reward includes it.

        With `trainer.loss.turn_discount`, a turn is trained by its own reward and the discounted rewards of
        later turns.
        """
        ...

    def report(self, **parts: float) -> None:
        """Say what an environment or a scorer of the loop makes of the conversation.

        A reward function reads it as `completion.reported`; `agent_loops.environment:environment_reward`
        returns it. A later call replaces parts of the same names.

        Raises:
            ValueError: A part is no finite number.
        """
        ...

    def branch(self) -> Session:
        """Open another trajectory that begins with everything up to here and ends with its block.

        It is one more member of the group, with its own reward. It reads what it inherits; each token is
        trained once, in the trajectory that sampled it. This session may go on concurrently. A block in which
        nothing is sampled makes no trajectory; a block that raises discards its trajectory and the branches
        of it. Running out of tokens or turns ends the block like a `return`.

        Example:
            >>> async with session.branch() as other:
            ...     other.add_messages([{"role": "user", "content": "Another way?"}])
            ...     turn = await other.generate()

            >>> async def answer(session):
            ...     async with session:
            ...         await session.generate()
            >>> both = session.branch(), session.branch()
            >>> done = await asyncio.gather(*map(answer, both))
        """
        ...

    def conversation(self) -> Session:
        """Open another conversation of the same attempt, which begins empty: a sub-agent's, for example.

        Otherwise it is like a branch: one of `rollout.max_branches`, a member of the group, open inside its
        block.

        Example:
            >>> async with session.conversation() as helper:
            ...     helper.start([{"role": "user", "content": "Summarise this: ..."}])
            ...     turn = await helper.generate()
        """
        ...

    def share_reward(self) -> None:
        """Make this session the reward source of its whole attempt.

        The reward function then receives this session's completion for each trajectory of the attempt.
        """
        ...

    async def __aenter__(self) -> Session:
        """Begin the block of a branch. The block of the session that `run` receives is optional."""
        ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        """End the block of a branch, as `branch` describes it."""
        ...
