"""The policy and its tools, turn by turn."""

from __future__ import annotations

import asyncio
from typing import Any

from agent_loops.base import AgentLoop
from agent_loops.parsing import Call, MalformedCall, load_parser
from agent_loops.tools import load_tool
from async_rl.errors import ConfigError, ToolError
from async_rl.rollout.api import Session
from async_rl.types import StopReason, Task


class ToolLoop(AgentLoop):
    """Lets the policy call tools until it answers without a call.

    The calls of one turn run side by side; their results go back in the order of the calls. A call that is
    malformed, names no tool, has wrong arguments, raises or runs past its time is answered with the error as
    text, so that the policy can do better.

    Args:
        tools: Dotted paths of typed functions, `module:function`.
        max_turns: Most turns of the policy.
        max_result_chars: A longer tool result is cut, and says so.
        parser: The format of the calls: a name of `agent_loops.parsing.PARSERS`, or `module:Class`.

    Raises:
        ConfigError: A tool is missing or cannot be described, or two have one name.
    """

    def __init__(
        self, tools: list[str], max_turns: int = 8, max_result_chars: int = 16_384, parser: str = "hermes"
    ) -> None:
        if max_turns < 1:
            raise ConfigError(f"rollout.agent_loop_args: max_turns is {max_turns}; expected at least 1")
        if isinstance(tools, str) or not tools:
            raise ConfigError(f"rollout.agent_loop_args: tools is {tools!r}; expected a list of dotted paths")
        loaded = [load_tool(path) for path in tools]
        self._tools = {tool.name: tool for tool in loaded}
        if len(self._tools) < len(loaded):
            raise ConfigError(f"rollout.agent_loop_args: two of the tools {tools} have the same name")
        self._schemas = [tool.schema for tool in loaded]
        self._parser = load_parser(parser)
        self._max_turns = max_turns
        self._max_result_chars = max_result_chars

    async def run(self, task: Task, session: Session) -> StopReason | None:
        """See `AgentLoop.run`."""
        session.start(task.messages, self._schemas)
        for turns_left in reversed(range(self._max_turns)):
            turn = await session.generate()
            if turn.finish_reason == "length":
                return "length"
            calls = self._parser.parse(turn.text, self._schemas).calls
            if not calls:
                return "completed"
            if not turns_left:
                break  # nobody would read the results
            results = await asyncio.gather(*(self._answer(call, session) for call in calls))
            session.add_messages(results)
            if session.remaining_tokens < 1:
                return "length"
        return "max_turns"

    async def _answer(self, call: Call, session: Session) -> dict[str, Any]:
        """The tool message that answers one call."""
        name = None if isinstance(call, MalformedCall) else call.name
        try:
            content = await self._result(call, session.tool_timeout_s)
            session.record_tool_call(error=False)
        except ToolError as error:
            content = f"Error: {error}"
            session.record_tool_call(error=True)
        if len(content) > self._max_result_chars:
            cut = len(content) - self._max_result_chars
            content = f"{content[: self._max_result_chars]}\n[{cut} more characters were cut]"
        message = {"role": "tool", "content": content}
        return {**message, "name": name} if name else message

    async def _result(self, call: Call, timeout_s: float) -> str:
        if isinstance(call, MalformedCall):
            raise ToolError(call.error)
        if call.name not in self._tools:
            raise ToolError(f"there is no tool {call.name!r}; there are {', '.join(self._tools)}")
        return await self._tools[call.name].call(call.arguments, timeout_s=timeout_s)
