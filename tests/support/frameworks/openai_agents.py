"""OpenAI's Agents SDK: its default is the Responses API."""

import asyncio
import json
import os
import sys

from agents import Agent, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)  # traces would go to OpenAI


@function_tool
def weather(city: str) -> str:
    """Tell the weather."""
    return f"{city}: rain"


async def main() -> None:
    question, then = (message["content"] for message in json.load(sys.stdin)["messages"])
    agent = Agent(name="Weather", instructions="Be brief.", model=os.environ["OPENAI_MODEL"], tools=[weather])
    answer = Runner.run_streamed(agent, question)
    async for _ in answer.stream_events():
        pass
    history = [*answer.to_input_list(), {"role": "user", "content": then}]
    print((await Runner.run(agent, history)).final_output)


asyncio.run(main())
