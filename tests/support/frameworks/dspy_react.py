"""DSPy's ReAct, over LiteLLM."""

import json
import os
import sys

import dspy

dspy.configure(lm=dspy.LM(f"openai/{os.environ['OPENAI_MODEL']}", cache=False))


def weather(city: str) -> str:
    """Tell the weather."""
    return f"{city}: rain"


agent = dspy.ReAct("question -> answer", tools=[weather])
question = json.load(sys.stdin)["messages"][0]["content"]
print(agent(question=question).answer)
