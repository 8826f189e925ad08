"""The process of an environment of verifiers: it loads the environment once, and plays episodes concurrently.

This is a separate program (`python -c SOURCE SETTINGS`) that our code never imports: it runs with the
interpreter that has the environment's packages, and needs only verifiers. `agent_loops.environment.verifiers`
is the other side.

```
 descriptor 0   {"number": 1, "episode": {"input", "url", …}}   {"cancel": 1}   {"number": 2, "tasks": 8}
 descriptor 1   {"ready": true} or {"fault"}   {"number": 1, "reward", …}    {"number": 2, "tasks"}
```

A line has one JSON object. What the environment prints goes to descriptor 2.
"""

from __future__ import annotations

import asyncio
import atexit
import importlib
import json
import logging
import os
import ssl
import sys
import threading
from copy import deepcopy
from typing import Any

END_S = 10.0
"""How long the environment may tear down what it holds, once the other side has closed descriptor 0."""

_EMPTY = "EmptyModelResponseError"


class RewardFunctionFailed(Exception):
    """A reward function raised."""


class FailedRewards(logging.Handler):
    """Raises the errors of reward functions, which verifiers only logs before it counts 0."""

    def emit(self, record: logging.LogRecord) -> None:
        """Raise out of the rubric."""
        if ".rubrics." in record.name and record.getMessage().startswith("Error calling"):
            raise RewardFunctionFailed(record.getMessage())


class EnvironmentServer:
    """Serves one environment."""

    def __init__(self, environment: Any, output: Any) -> None:
        self._environment = environment
        self._output = output
        self._running: dict[int, asyncio.Task[None]] = {}
        self._ssl = ssl.create_default_context()
        """Shared, because a client by itself reads all certificates anew."""

    async def serve(self) -> None:
        """Answer requests until descriptor 0 is closed."""
        closed = asyncio.Event()
        loop = asyncio.get_running_loop()

        def read() -> None:
            for line in sys.stdin.buffer:
                loop.call_soon_threadsafe(self._take, json.loads(line))
            # The event loop may be blocked, and threads of the environment may run on: the process ends.
            timer = threading.Timer(END_S, os._exit, (1,))
            timer.daemon = True
            timer.start()
            loop.call_soon_threadsafe(closed.set)

        threading.Thread(target=read, daemon=True).start()
        self._write(encode({"ready": True}))
        await closed.wait()
        for task in (running := list(self._running.values())):
            task.cancel()
        if running:
            await asyncio.wait(running)

    def _write(self, line: str) -> None:
        self._output.write(line)
        self._output.flush()

    def _take(self, request: dict[str, Any]) -> None:
        if "cancel" in request:
            if task := self._running.get(request["cancel"]):
                task.cancel()
            return
        number = request["number"]
        self._running[number] = asyncio.get_running_loop().create_task(self._answer(number, request))

    async def _answer(self, number: int, request: dict[str, Any]) -> None:
        try:
            answer = (
                await self._play(request["episode"])
                if "episode" in request
                else self._list_tasks(request["tasks"], request["evaluation"])
            )
            line = encode({"number": number, **answer})
        except Exception as error:
            line = encode({"number": number, "fault": describe(error)})
        finally:
            del self._running[number]
        self._write(line)

    async def _play(self, episode: dict[str, Any]) -> dict[str, Any]:
        import openai
        from verifiers.clients import OpenAIChatCompletionsClient

        # The other side bounds the time of an episode, and its endpoint needs no proxy.
        http = openai.DefaultAsyncHttpxClient(verify=self._ssl, trust_env=False)
        async with openai.AsyncOpenAI(
            base_url=episode["url"], api_key=episode["key"], timeout=None, http_client=http
        ) as client:
            output = await self._environment.run_rollout(
                episode["input"],
                OpenAIChatCompletionsClient(client),
                episode["model"],
                deepcopy(self._environment.sampling_args) | episode["sampling_args"],
            )
        error = output.get("error")
        return {
            "reward": output["reward"],
            "parts": output["metrics"],
            # An empty answer is the policy's own: what the rubric gives for it counts, as for any other.
            "error": error["error_chain_repr"] if error and error["error"] != _EMPTY else None,
            # Of `SingleTurnEnv`, the only turn is not cut.
            "is_cut": output["stop_condition"] == "max_turns_reached" and self._environment.max_turns > 1,
        }

    def _list_tasks(self, number: int, is_evaluation: bool) -> dict[str, Any]:
        environment = self._environment
        rows = environment.get_eval_dataset(number) if is_evaluation else environment.get_dataset(number)
        return {"tasks": [dict(row) for row in rows]}


def load(name: str, args: dict[str, Any]) -> Any:
    """Return the environment that a config names: an environment's id, or `module:Class`.

    Raises:
        ValueError: It cannot score an episode by itself.
    """
    import verifiers

    module, _, attribute = name.partition(":")
    if attribute:
        environment = getattr(importlib.import_module(module), attribute)(**args)
    else:
        environment = verifiers.load_environment(name, **args)
    if getattr(environment, "requires_group_rollouts", False):
        raise ValueError("its rubric scores whole groups; expected reward functions of one episode")
    return environment


def encode(answer: dict[str, Any]) -> str:
    """Return an answer as a line.

    Raises:
        ValueError: A number is not finite.
    """
    return json.dumps(answer, default=str, allow_nan=False) + "\n"


def describe(error: BaseException) -> str:
    """Return an error with its causes."""
    told: list[str] = []
    each: BaseException | None = error
    while each is not None and len(told) < 5:
        told.append(f"{type(each).__name__}: {each}")
        each = each.__cause__
    return ", caused by ".join(told)


def main(settings: dict[str, Any]) -> None:
    """Load the environment, and serve it."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path += settings["folders"]
    try:
        environment = load(settings["id"], settings["args"])
    except Exception as error:
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == "verifiers"
        output.write(encode({"fault": describe(error), "is_missing": is_missing}))
        output.flush()
        return
    logging.getLogger("verifiers").addHandler(FailedRewards(logging.ERROR))
    asyncio.run(EnvironmentServer(environment, output).serve())
    atexit._run_exitfuncs()  # environments tear down there
    os._exit(0)  # whatever threads they have left


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
