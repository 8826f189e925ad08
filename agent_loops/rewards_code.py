r"""Rewards programs by tests in the sandbox: `rollout.reward: agent_loops.rewards_code:code_tests`.

The task's answer holds the tests, as a value or as JSON text:

```
 {"inputs": ["1 2\n"], "outputs": ["3\n"]}                program input and expected output (APPS, PRIME)
 [{"input": "1 2\n", "output": "3\n"}]                    the same
 {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}   arguments and expected result of a function
 ["assert add(1, 2) == 3"]                                assertions after the program (MBPP); or one string
```
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import msgspec

from agent_loops.sandbox import Limits, ProgramResult, Sandbox
from async_rl.types import Completion, Task

_BLOCK: Final = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One test: of a program's output, or an assertion after it."""

    stdin: str = ""
    stdout: str | None = None
    check: str = ""


async def code_tests(
    task: Task,
    completion: Completion,
    *,
    partial: bool = False,
    max_tests: int | None = None,
    **limits: Any,
) -> dict[str, float]:
    """Return 1 if the last code block of the answer passes all tests, else 0.

    Args:
        task: The task, whose answer holds the tests.
        completion: The completion, whose last code block is tested.
        partial: Reward the share of passed tests; otherwise testing stops at the first failure.
        max_tests: The most tests to run.
        **limits: Fields of `agent_loops.sandbox.Limits`: `wall_s` for each test, `memory_mb`, …

    Raises:
        ValueError: The task's answer holds no tests.
    """
    cases = cases_of(task.answer)[:max_tests]
    sandbox = await asyncio.to_thread(_sandbox, msgspec.json.encode(limits, order="sorted"))
    program = program_of(completion.text)
    checks = [case for case in cases if case.stdout is None]
    prints = [case for case in cases if case.stdout is not None]
    passed = await _count_assertions(sandbox, program, checks, go_on=partial)
    if partial or passed == len(checks):
        passed += await _count_outputs(sandbox, program, prints, go_on=partial)
    share = passed / len(cases)
    return {"reward": share if partial else float(share == 1), "passed": share}


def program_of(text: str) -> str:
    """Return the last code block of an answer, or the whole answer if it has none."""
    blocks = _BLOCK.findall(text)
    return blocks[-1] if blocks else text


def cases_of(answer: Any) -> list[Case]:
    """Return the tests in a task's answer, in the forms that the module's docstring shows.

    Raises:
        ValueError: The answer holds no tests.
    """
    tests = answer
    if isinstance(answer, str):
        try:
            tests = msgspec.json.decode(answer)
        except msgspec.DecodeError:
            tests = [answer]
    cases: list[Case] = []
    match tests:
        case {"fn_name": str(name), "inputs": list(inputs), "outputs": list(outputs)} if name:
            pairs = zip(inputs, outputs, strict=True)
            cases = [Case(check=f"assert {name}(*{given!r}) == {wanted!r}") for given, wanted in pairs]
        case {"inputs": list(inputs), "outputs": list(outputs)}:
            pairs = zip(inputs, outputs, strict=True)
            cases = [Case(stdin=_text(given), stdout=_text(wanted)) for given, wanted in pairs]
        case [{"input": _, "output": _}, *_]:
            cases = [Case(stdin=_text(test["input"]), stdout=_text(test["output"])) for test in tests]
        case [str(), *_]:
            cases = [Case(check=test) for test in tests]
    if not cases:
        raise ValueError(
            f"the answer {answer!r:.200} holds no tests; expected inputs and outputs, or assert statements"
        )
    return cases


async def _count_assertions(sandbox: Sandbox, program: str, cases: Sequence[Case], *, go_on: bool) -> int:
    """Return how many assertions hold after the program, which runs once."""
    if not cases:
        return 0
    passed = 0
    async with sandbox.interpreter() as interpreter:
        ran: ProgramResult = await interpreter.run_program(program)
        for case in cases:
            if ran.interpreter_ended or (ran.ended in ("error", "exit") and case is cases[0]):
                break
            ran = await interpreter.run_program(case.check)
            passed += ran.ended == "done"
            if ran.ended != "done" and not go_on:
                break
    return passed


async def _count_outputs(sandbox: Sandbox, program: str, cases: Sequence[Case], *, go_on: bool) -> int:
    """Return how many runs print the expected output, each in a new interpreter."""
    passed = 0
    for case in cases:
        ran = await sandbox.run_program(program, stdin=case.stdin)
        if ran.ended in ("done", "exit") and _lines(ran.output) == _lines(case.stdout or ""):
            passed += 1
        elif not go_on:
            break
    return passed


def _lines(text: str) -> list[str]:
    """Return lines without trailing white space, as programming judges compare output."""
    return [line.rstrip() for line in text.strip().splitlines()]


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


@cache
def _sandbox(limits: bytes) -> Sandbox:
    return Sandbox(msgspec.json.decode(limits, type=Limits))
