"""PydanticAI, streamed: Responses for OpenAI's models, Messages for Anthropic's."""

import asyncio
import json
import os
import sys

from pydantic_ai import Agent

provider = sys.argv[1]
model = os.environ[f"{provider.upper()}_MODEL"]
agent = Agent(f"{provider}:{model}", instructions="Be brief.")


@agent.tool_plain
def weather(city: str) -> str:
    """Tell the weather."""
    return f"{city}: rain"


async def show(context, events):
    async for event in events:
        print(event)


async def main() -> None:
    history = []
    for message in json.load(sys.stdin)["messages"]:
        answer = await agent.run(message["content"], message_history=history, event_stream_handler=show)
        history = answer.all_messages()


asyncio.run(main())
