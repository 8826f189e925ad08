r"""Programs, tested in the sandbox: `rollout.reward: agent_loops.rewards_code:code_tests`.

The row's answer holds the tests, as JSON text or as it is:

```
 {"inputs": ["1 2\n"], "outputs": ["3\n"]}                what the program reads and must print (APPS, PRIME)
 [{"input": "1 2\n", "output": "3\n"}]                    the same
 {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}   what a function of it must return
 ["assert add(1, 2) == 3"]                                what must hold after it (MBPP); also one string
```
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import msgspec

from agent_loops.sandbox import Limits, Ran, Sandbox
from async_rl.types import Completion, Task

_BLOCK: Final = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One test: of what a program prints, or of what holds after it."""

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
    """1 when the program in the answer passes all tests, else 0; its last block of code counts.

    Args:
        task: Its answer holds the tests.
        completion: Of the policy.
        partial: Reward the share of tests that pass; otherwise the first that fails is the last that runs.
        max_tests: Only so many of them.
        **limits: Of `agent_loops.sandbox.Limits`: `wall_s` for each test, `memory_mb`, …

    Raises:
        ValueError: The answer holds no tests.
    """
    cases = cases_of(task.answer)[:max_tests]
    sandbox = await asyncio.to_thread(_sandbox, msgspec.json.encode(limits, order="sorted"))
    program = program_of(completion.text)
    checks = [case for case in cases if case.stdout is None]
    prints = [case for case in cases if case.stdout is not None]
    passed = await _check(sandbox, program, checks, go_on=partial)
    if partial or passed == len(checks):
        passed += await _print(sandbox, program, prints, go_on=partial)
    share = passed / len(cases)
    return {"reward": share if partial else float(share == 1), "passed": share}


def program_of(text: str) -> str:
    """The last block of code of an answer, or all of it where there is none."""
    blocks = _BLOCK.findall(text)
    return blocks[-1] if blocks else text


def cases_of(answer: Any) -> list[Case]:
    """The tests that a row's answer holds; see the top of this file.

    Raises:
        ValueError: It holds none.
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


async def _check(sandbox: Sandbox, program: str, cases: Sequence[Case], *, go_on: bool) -> int:
    """How many hold after the program, which runs once."""
    if not cases:
        return 0
    passed = 0
    async with sandbox.interpreter() as interpreter:
        ran: Ran = await interpreter.run(program)
        for case in cases:
            if ran.is_over or (ran.ended in ("error", "exit") and case is cases[0]):
                break
            ran = await interpreter.run(case.check)
            passed += ran.ended == "done"
            if ran.ended != "done" and not go_on:
                break
    return passed


async def _print(sandbox: Sandbox, program: str, cases: Sequence[Case], *, go_on: bool) -> int:
    """How many print what they should, each in an interpreter of its own."""
    passed = 0
    for case in cases:
        ran = await sandbox.run(program, stdin=case.stdin)
        if ran.ended in ("done", "exit") and _lines(ran.output) == _lines(case.stdout or ""):
            passed += 1
        elif not go_on:
            break
    return passed


def _lines(text: str) -> list[str]:
    """As judges compare: white space at the ends of lines and of the whole does not count."""
    return [line.rstrip() for line in text.strip().splitlines()]


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


@cache
def _sandbox(limits: bytes) -> Sandbox:
    return Sandbox(msgspec.json.decode(limits, type=Limits))
