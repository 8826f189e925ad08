"""The shell that the policy has in a sandbox: what it reads, and what it is not blamed for."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from agent_loops.testing import ScriptedSession, make_task
from agent_loops.tool_loop import ToolLoop
from async_rl.errors import SandboxLost
from tests.support.memory_sandboxes import SERVICES, backend


def call(command: str) -> str:
    arguments = {"name": "shell", "arguments": {"command": command}}
    return f"<tool_call>\n{json.dumps(arguments)}\n</tool_call>"


def shell(given: Any, **args: Any) -> ToolLoop:
    tool = {"tool": "agent_loops.sandboxes.tools:Shell", "args": {"backend": given, **args}}
    return ToolLoop(tools=[tool], parser="hermes")


@pytest.mark.real_time
@pytest.mark.needs("namespaces")
async def test_the_policy_reads_outputs_exit_codes_and_time_limits(tmp_path: Path) -> None:
    session = ScriptedSession(
        call("echo 42 > answer; cat answer"),
        call("cat answer; cat nothing"),
        call("sleep 1000"),
        call("true"),
        call("yes | head -c 100000"),
        "It is 42.",
    )
    async with shell("local", folder=tmp_path, command_s=1.0, max_output_bytes=10) as loop:
        assert await loop.run(make_task(), session) == "completed"
    first, second, third, fourth, fifth = session.tool_results
    assert first == "42"
    assert second.startswith("42\ncat: ")
    assert second.endswith("[exit code 1]")
    assert third == "[ended after 1 s]"
    assert fourth == "(no output)"
    assert fifth == "y\ny\ny\ny\ny\n[more output was cut]"
    assert session.tool_calls == ["ok"] * 5
    assert not list(tmp_path.iterdir())


async def test_each_trajectory_has_a_sandbox_of_the_image_that_its_example_names(tmp_path: Path) -> None:
    given = backend(str(tmp_path))
    service = SERVICES[str(tmp_path)]

    async def play(loop: ToolLoop, image: str) -> list[str]:
        session = ScriptedSession(call("a"), call("b"), "Done.")
        await loop.run(make_task(metadata={"image": image}), session)
        return [result.partition(":")[0] for result in session.tool_results]

    async with shell(given, folder=tmp_path, image_field="image") as loop:
        boxes = await asyncio.gather(play(loop, "one"), play(loop, "two"))
        assert all(len(set(names)) == 1 for names in boxes)
        assert len(service.started) == 2
        await asyncio.sleep(10.0)
        assert not service.running


@pytest.mark.parametrize("when", ["start", "command"])
async def test_the_attempt_fails_and_the_policy_reads_nothing_when_a_sandbox_is_lost(
    tmp_path: Path, when: str
) -> None:
    given = backend(str(tmp_path))
    service = SERVICES[str(tmp_path)]
    service.num_failing_starts = 1000 if when == "start" else 0

    class Session(ScriptedSession):
        async def generate(self, **options: Any) -> Any:
            if self.num_turns == 1:
                service.running.clear()
            return await super().generate(**options)

    session = Session(call("true"), call("true"), "Done.")
    with pytest.raises(BaseExceptionGroup) as failed:
        async with shell(given, folder=tmp_path, start_s=20.0) as loop:
            await loop.run(make_task(), session)
    assert failed.group_contains(SandboxLost)
    assert len(session.tool_results) == (when == "command")
