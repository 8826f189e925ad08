"""CrewAI: one agent with a task."""

import json
import os
import sys

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool


@tool
def weather(city: str) -> str:
    """Tell the weather."""
    return f"{city}: rain"


question, then = (message["content"] for message in json.load(sys.stdin)["messages"])
agent = Agent(
    role="Forecaster",
    goal="Tell the weather",
    backstory="You are brief.",
    tools=[weather],
    llm=LLM(os.environ["OPENAI_MODEL"], custom_openai=True),
)
tasks = [Task(description=text, expected_output="A sentence", agent=agent) for text in (question, then)]
print(Crew(agents=[agent], tasks=tasks).kickoff())
