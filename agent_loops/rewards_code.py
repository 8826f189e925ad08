r"""Rewards programs by tests in the sandbox: `rollout.reward: agent_loops.rewards_code:code_tests`.

The task's answer holds the tests, as a value or as JSON text:

```
 {"inputs": ["1 2\n"], "outputs": ["3\n"]}                program input and expected output (APPS, PRIME)
 [{"input": "1 2\n", "output": "3\n"}]                    the same
 {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}   arguments and expected result of a function
 ["assert add(1, 2) == 3"]                                assertions about it (MBPP, HumanEval); or one string
```

The program decides nothing: the tests run in an interpreter of their own (`agent_loops.code_test_child`), and
expected output is compared here. docs/design/security.md states what this prevents.

```
 interpreter of the tests ── question ──► here ── question ──► interpreter of the program
   compares, decides      ◄── answer ────        ◄── answer ──   computes
```
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec

from agent_loops.sandbox import MAX_CODE_BYTES, START_S, Interpreter, Limits, Sandbox
from async_rl.errors import EnvironmentNotReady
from async_rl.types import Completion, Task

_BLOCK: Final = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)

_PREPARE: Final = (
    f"exec({Path(__file__).with_name('code_test_child.py').read_text(encoding='utf-8')!r}, "
    "{'__name__': 'code_test_child', 'namespace': globals()})"
)

_DISCARD_ERRORS: Final = "import os as _os\n_os.dup2(_os.open('/dev/null', _os.O_WRONLY), 2)\ndel _os"


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
        ValueError: The task's answer holds no tests, or tests that cannot run.
    """
    cases = cases_of(task.answer)[:max_tests]
    sandbox = await asyncio.to_thread(_sandbox, msgspec.json.encode(limits, order="sorted"))
    program = program_of(completion.text)
    if len(program.encode(errors="replace")) > MAX_CODE_BYTES:
        return {"reward": 0.0, "passed": 0.0}
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
    """Return how many assertions hold about the program, which runs once."""
    if not cases:
        return 0
    passed = 0
    async with sandbox.interpreter() as tests, sandbox.interpreter() as tested:
        await _prepare(tests, cases)
        ran = await tested.run_program(program)
        if ran.ended != "done":
            return 0

        async def answer(question: bytes) -> bytes:
            nonlocal ran
            ran, line = await tested.answer_question(question)
            return line if ran.ended == "done" else b""

        bound = await tests.run_program("bind_names()", answer=answer)
        for case in cases:
            if bound.ended != "done" or ran.interpreter_ended:
                break
            test = await tests.run_program(case.check, answer=answer)
            passed += test.ended == "done"
            if test.interpreter_ended or (test.ended != "done" and not go_on):
                break
    return passed


async def _prepare(tests: Interpreter, cases: Sequence[Case]) -> None:
    """Let an interpreter analyse the tests, before a program can disturb it."""
    checks = msgspec.json.encode([case.check for case in cases]).decode()
    ran = await tests.run_program(_PREPARE, stdin=checks, wall_s=START_S)
    if ran.ended in ("error", "exit"):
        raise ValueError(f"the tests in the answer cannot run: {ran.output.strip()[-500:]}")
    if ran.ended != "done":
        raise EnvironmentNotReady(
            f"sandbox: an interpreter did not read the tests within its limits ({ran.ended}): the machine is "
            "overloaded, or memory_mb is too low"
        )


async def _count_outputs(sandbox: Sandbox, program: str, cases: Sequence[Case], *, go_on: bool) -> int:
    """Return how many runs print the expected output, each in a new interpreter.

    As for programming judges, what a program writes to its standard error is no output.
    """
    passed = 0
    for case in cases:
        async with sandbox.interpreter() as interpreter:
            await interpreter.run_program(_DISCARD_ERRORS)
            ran = await interpreter.run_program(program, stdin=case.stdin)
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
