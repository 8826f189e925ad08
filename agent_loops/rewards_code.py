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
import json
import math
import re
from collections.abc import Sequence
from decimal import Decimal
from functools import cache
from pathlib import Path
from textwrap import dedent
from typing import Any, Final

import msgspec

from agent_loops.rewards import final_answer, str_of_number
from agent_loops.sandbox import MAX_CODE_BYTES, START_S, Interpreter, Limits, Sandbox
from async_rl.errors import SandboxLost
from async_rl.types import Completion, Task

_FENCE: Final = re.compile(
    r"(?P<before>(?:(?!`{3}|~{3}).)*)(?P<fence>`{3,}(?=[^`]*$)|~{3,})[ \t]*(?P<info>.*)$"
)
_MARKS: Final = re.compile(r"[ \t]*(?:(?:[-*+>]|\d+[.)])[ \t]*)*")
"""What may begin the lines of lists and quotations."""
_LANGUAGE: Final = re.compile(r"(?:\{?\.?[\w+#-]\S*)?")
_PYTHON: Final = re.compile(r"\{?\.?(?:python|py)[\d.]*(?![\w+#-])", re.IGNORECASE)

_PREPARE: Final = (
    f"exec({Path(__file__).with_name('code_test_child.py').read_text(encoding='utf-8')!r}, "
    "{'__name__': 'code_test_child', 'namespace': globals()})"
)

_AS_MODULE: Final = "import sys; __name__ = 'program'; sys.modules[__name__] = type(sys)(__name__); del sys"
"""A function is tested as an import would test it: what the program guards by `__main__` does not run."""

_LEETCODE: Final = (
    "import collections, bisect, functools, heapq, itertools, math, string\n"
    "from typing import *\nfrom collections import *\nfrom bisect import *\nfrom functools import *\n"
    "from heapq import *\nfrom itertools import *\nfrom math import *\n"
)
"""Names that a `class Solution` uses without an import, as on the sites from which such problems come."""

_RELATIVE_TOLERANCE, _ABSOLUTE_TOLERANCE = 1e-6, 1e-9
"""Tolerances for printed numbers that the tests give with a fraction, as for APPS."""

_REAL: Final = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_FRACTION: Final = re.compile(r"(?=.*[.eE])[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")

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
    program = program_of(final_answer(completion))
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
    """Return the last Python block of an answer, else its last block without a language, else the answer.

    Blocks are fenced as in Markdown: a fence is closed by one that is as long, at the start of a line. Empty
    blocks do not count.

    Source: CommonMark 0.31, section 4.5. A block may also begin behind other text of its line, and text that
    is not a language may follow the closing fence.
    """
    blocks: dict[bool, list[str]] = {True: [], False: []}
    opened: re.Match[str] | None = None
    lines: list[str] = []

    def end_block() -> None:
        assert opened is not None
        program = dedent("".join(lines)) if lines and lines[0][:1].isspace() else "".join(lines)
        is_python = bool(_PYTHON.match(opened["info"]))
        if program.strip() and (is_python or not opened["info"].strip()):
            blocks[is_python].append(program.lstrip("\ufeff"))
        lines.clear()

    for line in text.lstrip("\ufeff").replace("\r\n", "\n").splitlines(keepends=True):
        if opened is None:
            opened = _opening_fence(line)
            continue
        if opened["before"].lstrip().startswith(">"):
            line = re.sub(r"^[ \t]*> ?", "", line)
        mark = opened["fence"][0]
        if re.match(rf"[ \t]*{opened['fence']}{mark}*(?!{mark}|\{{?\.?\w)", line):
            end_block()
            opened = None
        else:
            lines.append(line)
    if opened is not None:
        lines[-1:] = [line.rstrip().removesuffix(opened["fence"]) for line in lines[-1:]]
        end_block()
    return (blocks[True] or blocks[False] or [text.lstrip("\ufeff")])[-1]


def cases_of(answer: Any) -> list[Case]:
    """Return the tests in a task's answer, in the forms that the module's docstring shows.

    Raises:
        ValueError: The answer holds no tests, or incomplete ones.
    """
    tests = answer
    if isinstance(answer, str):
        try:
            tests = json.loads(answer, parse_int=_parse_int)
        except ValueError:
            tests = [answer]
    cases: list[Case] = []
    match tests:
        case {"inputs": list(inputs), "outputs": list(outputs)} if len(inputs) != len(outputs):
            raise ValueError(
                f"the answer has {len(inputs)} inputs and {len(outputs)} outputs; expected as many of each"
            )
        case [{"testtype": "functional"}, *_]:
            raise ValueError(
                "the answer has functional tests of LiveCodeBench, which do not name the function; expected "
                '{"fn_name": …, "inputs": …, "outputs": …}, with the name from the metadata of the problem'
            )
        case {"fn_name": str(name), "inputs": list(inputs), "outputs": list(outputs)} if name:
            cases = [
                Case(check=f"assert equals({name}(*{_literal(_restore_keys(given))}), {_literal(wanted)})")
                for given, wanted in zip(inputs, outputs, strict=True)
            ]
        case {"inputs": list(inputs), "outputs": list(outputs)}:
            cases = [
                Case(stdin=_text(given), stdout=_text(wanted))
                for given, wanted in zip(inputs, outputs, strict=True)
            ]
        case [dict() | str(), *_]:
            cases = [_case(test, number) for number, test in enumerate(tests, start=1)]
    if not cases:
        raise ValueError(
            f"the answer {_literal(answer):.200} holds no tests; expected inputs and outputs, or assert "
            "statements"
        )
    return cases


def _case(test: Any, number: int) -> Case:
    match test:
        case {"input": given, "output": wanted}:
            return Case(stdin=_text(given), stdout=_text(wanted))
        case str():
            return Case(check=test)
    raise ValueError(
        f"test {number} of the answer is {_literal(test):.200}; expected input and output, or an assertion"
    )


def _opening_fence(line: str) -> re.Match[str] | None:
    """Return the fence that opens a block: not one that text mentions, in the middle of a line."""
    found = _FENCE.match(line)
    if found is None or _MARKS.fullmatch(found["before"]):
        return found
    is_last = found["fence"][0] == "`" and _LANGUAGE.fullmatch(found["info"].rstrip())
    return found if is_last else None


async def _count_assertions(sandbox: Sandbox, program: str, cases: Sequence[Case], *, go_on: bool) -> int:
    """Return how many assertions hold about the program, which runs once."""
    if not cases:
        return 0
    passed = 0
    async with sandbox.interpreter() as tests, sandbox.interpreter() as tested:
        await _prepare(tests, cases)
        await tested.run_program(_AS_MODULE)
        if "class Solution" in program:
            await tested.run_program(_LEETCODE)
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
        raise SandboxLost(
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
            ran = await interpreter.run_program(program, stdin=case.stdin, is_last=True)
        if ran.ended in ("done", "exit") and is_same_output(ran.output, case.stdout or ""):
            passed += 1
        elif not go_on:
            break
    return passed


def is_same_output(printed: str, expected: str) -> bool:
    """Return whether a program printed what was expected, as programming judges compare it.

    White space at the ends of lines does not count. Numbers that are expected with a fraction may differ by
    1e-6.
    """
    lines, wanted = ([line.rstrip() for line in text.strip().splitlines()] for text in (printed, expected))
    return lines == wanted or (len(lines) == len(wanted) and all(map(_is_same_line, lines, wanted)))


def _is_same_line(printed: str, expected: str) -> bool:
    words, wanted = printed.split(), expected.split()
    return len(words) == len(wanted) and all(map(_is_same_word, words, wanted))


def _is_same_word(printed: str, expected: str) -> bool:
    if printed == expected:
        return True
    if not _FRACTION.fullmatch(expected) or not _REAL.fullmatch(printed):
        return False
    return math.isclose(
        float(printed), float(expected), rel_tol=_RELATIVE_TOLERANCE, abs_tol=_ABSOLUTE_TOLERANCE
    )


def _parse_int(digits: str) -> int:
    """Return a whole number, also one of more digits than Python converts from text."""
    return int(Decimal(digits))


def _literal(value: Any) -> str:
    """Return the source of a value from JSON: `repr` writes neither numbers of many digits nor constants."""
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_literal(each)}" for key, each in value.items()) + "}"
    if type(value) is int and value.bit_length() > 10_000:
        return hex(value)
    return f"float('{value}')" if type(value) is float else repr(value)


def _restore_keys(arguments: Any) -> Any:
    """Return arguments in which mappings have whole numbers as keys again, which JSON makes strings.

    Source: APPS, `apps_metric/testing_util.py`.
    """
    if isinstance(arguments, list):
        return [_restore_keys(each) for each in arguments]
    if isinstance(arguments, dict):
        whole = arguments and all(re.fullmatch(r"-?\d+", key) for key in arguments)
        return {int(key) if whole else key: _restore_keys(value) for key, value in arguments.items()}
    return arguments


def _text(value: Any) -> str:
    return "\n".join(map(str_of_number, value if isinstance(value, list) else [value]))


@cache
def _sandbox(limits: bytes) -> Sandbox:
    return Sandbox(msgspec.json.decode(limits, type=Limits))
