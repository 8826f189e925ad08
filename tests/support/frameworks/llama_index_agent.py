"""LlamaIndex's FunctionAgent, which streams."""

import asyncio
import json
import os
import sys

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.memory import Memory
from llama_index.llms.openai_like import OpenAILike


def weather(city: str) -> str:
    """Tell the weather."""
    return f"{city}: rain"


async def main() -> None:
    model = OpenAILike(
        model=os.environ["OPENAI_MODEL"],
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        is_chat_model=True,
        is_function_calling_model=True,
    )
    agent = FunctionAgent(tools=[weather], llm=model, system_prompt="Be brief.")
    memory = Memory.from_defaults()
    for message in json.load(sys.stdin)["messages"]:
        print(await agent.run(message["content"], memory=memory))


asyncio.run(main())
