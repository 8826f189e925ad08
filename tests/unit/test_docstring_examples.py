"""The examples in docstrings run, and give what they show."""

from __future__ import annotations

import ast
import asyncio
import doctest
import importlib
import inspect
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from agent_loops.testing import ScriptedSession, make_task

ROOT = Path(__file__).parents[2]
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for package in ("async_rl", "agent_loops", "trainer")
    for path in (ROOT / package).rglob("*.py")
    if ">>>" in path.read_text()
)


def run_example(example: doctest.Example, names: dict[str, Any], runner: asyncio.Runner) -> None:
    """Run one example, which may await, as a console does."""
    code = compile(example.source, "<example>", "single", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = FunctionType(code, names)()
    if code.co_flags & inspect.CO_COROUTINE:
        runner.run(result)


@pytest.mark.real_time
@pytest.mark.parametrize("name", MODULES)
def test_examples_show_what_they_do(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for test in doctest.DocTestFinder().find(importlib.import_module(name), name):
        names = dict(test.globs)
        names |= {"session": ScriptedSession(*["Yes."] * 9, task=make_task()), "asyncio": asyncio}
        with asyncio.Runner() as runner:
            for example in test.examples:
                run_example(example, names, runner)
                assert capsys.readouterr().out == example.want, (test.name, example.source)
