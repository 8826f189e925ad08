"""smolagents: an agent whose actions are code, or calls of tools."""

import json
import os
import sys

import smolagents
from smolagents import OpenAIModel, tool


@tool
def weather(city: str) -> str:
    """Tell the weather.

    Args:
        city: The city.
    """
    return f"{city}: rain"


model = OpenAIModel(
    os.environ["OPENAI_MODEL"],
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
)
agent = getattr(smolagents, sys.argv[1])(tools=[weather], model=model, stream_outputs=True)
first, then = (message["content"] for message in json.load(sys.stdin)["messages"])
agent.run(first)
print(agent.run(then, reset=False))
