"""LangChain's agent on LangGraph, which keeps the history in a checkpointer; streamed."""

import json
import os
import sys

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver


def weather(city: str) -> str:
    """Tell the weather."""
    return f"{city}: rain"


agent = create_agent(
    ChatOpenAI(model=os.environ["OPENAI_MODEL"]),
    tools=[weather],
    system_prompt="Be brief.",
    checkpointer=InMemorySaver(),
)
for message in json.load(sys.stdin)["messages"]:
    config = {"configurable": {"thread_id": "1"}}
    for piece, _ in agent.stream({"messages": [message]}, config, stream_mode="messages"):
        print(piece.content, end="")
