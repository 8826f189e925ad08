"""An agent written for OpenAI's API, which knows nothing about training."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from openai import AsyncOpenAI, OpenAI

from agent_loops.calculator import calculator

MAX_TURNS = 4
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "Numbers with + - * / ( )."}},
            "required": ["expression"],
        },
    },
}


async def agent(task: Any, api: Any) -> None:
    """Entry point for `rollout.agent_loop_args.agent`, with a client of the session."""
    await solve(api.client, api.model, task.messages)


async def solve(client: AsyncOpenAI, model: str, messages: list[Any]) -> str:
    """Answer a question, with a calculator."""
    messages = list(messages)
    for _ in range(MAX_TURNS):
        answer = await client.chat.completions.create(model=model, messages=messages, tools=[TOOL])
        message = answer.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message)
        messages += [result(call) for call in message.tool_calls]
    return "I give up."


def result(call: Any) -> dict[str, Any]:
    """Return the message that answers a tool call; the model reads errors and can correct the call."""
    try:
        content = calculator(**json.loads(call.function.arguments))
    except (ValueError, TypeError, ZeroDivisionError) as error:
        content = f"Error: {error}"
    return {"role": "tool", "tool_call_id": call.id, "content": content}


def main() -> None:
    """Entry point for `rollout.agent_loop_args.command`: a separate program, streamed and without tools."""
    task = json.load(sys.stdin)
    client = OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY
    chunks = client.chat.completions.create(
        model=os.environ["OPENAI_MODEL"], messages=task["messages"], stream=True
    )
    for chunk in chunks:
        print(chunk.choices[0].delta.content or "", end="", flush=True)


if __name__ == "__main__":
    main()
