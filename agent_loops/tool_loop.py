"""An agent loop in which the policy calls tools, turn by turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from agent_loops.base import AgentLoop
from agent_loops.parsing import ToolParser, load_parser, recognise
from agent_loops.toolbox import Toolbox
from async_rl.errors import ConfigError
from async_rl.rollout.session.api import Session
from async_rl.runtime.supervision import Nursery
from async_rl.types import StopReason, Task


class ToolLoop(AgentLoop):
    """Lets the policy call tools until it answers without a call.

    The calls of one turn run concurrently; their results are returned in the order of the calls. A call that
    is malformed, names an unknown tool, has wrong arguments, raises or times out is answered with the error
    as text, so that the policy can correct it.

    Args:
        tools: Dotted paths of typed functions and of classes with `execute`, or mappings with the fields of
            `agent_loops.toolbox.ToolSpec` or `McpSpec`.
        max_turns: The most turns of the policy.
        max_calls: The most calls of one turn; further ones are answered with an error.
        max_result_chars: The most characters of a tool result; a longer one is cut and says so.
        parser: The format of the calls: a name of `agent_loops.parsing.PARSERS`, or `module:Class`; by
            default the format that the model's chat template teaches.

    Raises:
        ConfigError: A tool is missing or cannot be described, or two have one name.
    """

    has_tools = True

    def __init__(
        self,
        tools: Sequence[str | Mapping[str, Any]],
        max_turns: int = 8,
        max_calls: int = 16,
        max_result_chars: int = 16_384,
        parser: str | None = None,
    ) -> None:
        for name, value in (("max_turns", max_turns), ("max_calls", max_calls)):
            if value < 1:
                raise ConfigError(f"rollout.agent_loop_args: {name} is {value}; expected at least 1")
        self._toolbox = Toolbox(tools)
        self._parser = None if parser is None else load_parser(parser)
        self._parser_name = parser
        self._max_turns = max_turns
        self._max_calls = max_calls
        self._max_result_chars = max_result_chars

    async def __aenter__(self) -> Self:
        """Connect to the MCP servers among the tools, before the first trajectory of a run."""
        await self._toolbox.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._toolbox.__aexit__(*error)

    def check(self, chat_template: str) -> list[str]:
        """Return the findings for `async-rl check`.

        Raises:
            ConfigError: The format of the calls is unknown.
        """
        name = self._parser_name or f"{recognise(chat_template)}, recognised from the chat template"
        return [f"tools: {self._toolbox.listing}", f"tool-call parser: {name}"]

    async def run(self, task: Task, session: Session) -> StopReason | None:
        """Implements `AgentLoop.run`."""
        parser = self._parser or self._recognised(session.chat_template)
        schemas = self._toolbox.schemas
        session.start(task.messages, schemas)
        async with self._toolbox.open_tools(task, session, self._max_result_chars) as tools:
            for turns_left in reversed(range(self._max_turns)):
                turn = await session.generate()
                if turn.finish_reason == "length":
                    return "length"
                calls = parser.parse(turn.text, schemas).calls
                if not calls:
                    return "completed"
                if not turns_left:
                    break  # no further turn would read the results
                async with Nursery() as nursery:  # waits for all calls, even if it is cancelled
                    answers = [
                        nursery.start_task(f"tool call {number}", tools.answer_call(call))
                        for number, call in enumerate(calls[: self._max_calls])
                    ]
                excess = [tools.refuse_call(self._max_calls) for _ in calls[self._max_calls :]]
                session.add_messages([*(answer.result() for answer in answers), *excess])
        return "max_turns"

    def _recognised(self, chat_template: str) -> ToolParser:
        self._parser = load_parser(recognise(chat_template))
        return self._parser
