"""AutoGen's AssistantAgent, streamed."""

import asyncio
import json
import os
import sys

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient


async def weather(city: str) -> str:
    """Tell the weather."""
    return f"{city}: rain"


async def main() -> None:
    client = OpenAIChatCompletionClient(
        model=os.environ["OPENAI_MODEL"],
        model_info={
            "vision": False,
            "function_calling": True,
            "json_output": False,
            "structured_output": False,
            "family": "unknown",
        },
    )
    agent = AssistantAgent(
        "assistant",
        client,
        tools=[weather],
        system_message="Be brief.",
        model_client_stream=True,
        max_tool_iterations=5,
    )
    for message in json.load(sys.stdin)["messages"]:
        async for event in agent.run_stream(task=message["content"]):
            print(event)
    await client.close()


asyncio.run(main())
