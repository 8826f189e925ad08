"""Anthropic's SDK with its tool runner, streamed."""

import json
import os
import sys

from anthropic import Anthropic, beta_tool


@beta_tool
def weather(city: str) -> str:
    """Tell the weather."""
    return f"{city}: rain"


client = Anthropic()
messages = []
for message in json.load(sys.stdin)["messages"]:
    messages.append(message)
    runner = client.beta.messages.tool_runner(
        model=os.environ["ANTHROPIC_MODEL"],
        max_tokens=512,
        system="Be brief.",
        tools=[weather],
        messages=messages,
        stream=True,
    )
    for stream in runner:
        for text in stream.text_stream:
            print(text, end="")
        answer = stream.get_final_message()
        messages.append({"role": "assistant", "content": answer.content})
        if results := runner.generate_tool_call_response():
            messages.append(results)
