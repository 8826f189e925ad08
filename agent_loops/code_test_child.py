"""The program that tests a program: runs in a sandboxed interpreter of its own, never in ours.

```
 interpreter of the tests ── question: a name, an attribute, a call ──► `agent_loops.rewards_code`
   assert add(1, 2) == 3                                                    │ passes lines on, unread
            ▲                                                               ▼
            └──── answer: plain data, or which error ──────────── interpreter of the program
```

`agent_loops.rewards_code` runs this file before the tests, which it reads as JSON from standard input. No
code of the policy runs here. What the program returns arrives as plain data of exact types: only Python's own
types are compared with the expected values, which never leave this interpreter. Any other object is a
`Remote`, which cannot be compared.
"""

from __future__ import annotations

import ast
import builtins
import collections
import json
import math
import os
import symtable
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

from __main__ import ask, decode, encode  # of `agent_loops.sandbox_child`

TOLERANCE = 1e-6
"""Relative tolerance for results that the tests give with a fraction, as for printed ones."""
COLLECTIONS = {"Counter", "OrderedDict", "defaultdict", "deque", "namedtuple"}
"""Names of `collections` that tests use without an import."""


class Remote:
    """An object of the program that is no plain data: tests can call it and read it, but not compare it."""

    __slots__ = ("_number",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, number: int) -> None:
        self._number = number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the object in the program's interpreter."""
        return ask_program("call", self, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return ask_program("attribute", self, name)

    def __iter__(self) -> Iterator[Any]:
        return iter(ask_program("items", self))

    def __len__(self) -> int:
        return self.call_special("__len__")  # type: ignore[no-any-return]

    def __getitem__(self, key: Any) -> Any:
        return self.call_special("__getitem__", key)

    def __str__(self) -> str:
        return self.call_special("__str__")  # type: ignore[no-any-return]

    def call_special(self, name: str, *args: Any) -> Any:
        """Call a special method, whose absence is a TypeError."""
        try:
            method = ask_program("attribute", self, name)
        except AttributeError:
            raise TypeError(f"the program's object has no {name}") from None
        return method(*args)

    def refuse(self, *_: object) -> NoReturn:
        """Raise TypeError: the program would decide the comparison."""
        raise TypeError("the program returned an object that cannot be compared; expected plain data")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = refuse


def ask_program(*question: Any) -> Any:
    """Return the program's answer, or raise the error that it raised."""
    line = ask(json.dumps(encode(question, number_of)).encode())
    kind = None
    try:
        match json.loads(line.decode()):
            case ["value", data]:
                return decode(data, Remote)
            case ["error", str(name)]:
                kind = getattr(builtins, name, None)
    except Exception:
        pass  # a forged answer
    if (
        isinstance(kind, type)
        and issubclass(kind, Exception)
        and not issubclass(kind, StopIteration | StopAsyncIteration)  # would end a loop of the tests
    ):
        raise kind("raised by the program")
    # The program has exited or forged an answer. No `except` of a test shall take that for an expected error.
    os._exit(1)


def number_of(value: object) -> int:
    """Return the number of an object of the program."""
    if isinstance(value, Remote):
        return object.__getattribute__(value, "_number")  # type: ignore[no-any-return]
    raise TypeError(f"a test passes {value!r:.200} to the program; expected plain data")


def names_of_the_program(tests: list[str]) -> tuple[list[str], list[str]]:
    """Return the names that tests expect of the program, and the modules that they use without an import.

    The program does not decide this: it could redefine the functions by which the tests compare.
    """
    trees = [ast.parse(test) for test in tests]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    called = {call.func.id for call in calls if isinstance(call.func, ast.Name)}
    bound, read = set(), set()
    for test in tests:
        top = symtable.symtable(test, "test", "exec")
        tables = [top]
        while tables:
            table = tables.pop()
            tables += table.get_children()
            for symbol in table.get_symbols():
                is_global = table is top or symbol.is_global()
                if is_global and (symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()):
                    bound.add(symbol.get_name())
                elif is_global and symbol.is_referenced():
                    read.add(symbol.get_name())
    free = sorted(read - bound)
    modules = [name for name in free if name in sys.stdlib_module_names and name not in called]
    wanted = [
        name
        for name in free
        if name not in (*modules, *COLLECTIONS, "equals") and not hasattr(builtins, name)
    ]
    if not wanted:  # a task may ask for a function with the name of a builtin: `assert sum(10, 15) == 6`
        inner = [
            call.func.id
            for call in calls
            if isinstance(call.func, ast.Name)
            and call.func.id not in bound
            and not any(isinstance(node, ast.Call) for arg in call.args for node in ast.walk(arg))
        ]
        wanted = inner[:1]
    for call in calls:
        if isinstance(call.func, ast.Name) and call.func.id in wanted:
            for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
                if isinstance(argument, ast.Lambda):
                    raise SystemExit(f"{ast.unparse(call)} passes a function; expected plain data")
    return wanted, modules


def prepare(namespace: dict[str, Any], tests: list[str]) -> None:
    """Give the tests the modules that they use, and `bind_names`, to be called once the program has run."""
    try:
        wanted, modules = names_of_the_program(tests)
    except SyntaxError as error:
        raise SystemExit(f"SyntaxError: {error}") from None

    def bind_names() -> None:
        """Give the tests the names that they expect of the program."""
        del namespace["bind_names"]
        for name in wanted:
            namespace[name] = find(name)

    namespace["equals"] = equals
    namespace.update({name: __import__(name) for name in modules})
    namespace.update({name: getattr(collections, name) for name in COLLECTIONS})
    namespace["bind_names"] = bind_names


def find(name: str) -> Any:
    """Return what the program calls by a name: its own, or a method of its `class Solution` (LeetCode)."""
    try:
        return ask_program("name", name)
    except KeyError:
        pass
    try:
        solution = ask_program("name", "Solution")
    except KeyError:
        return missing
    return lambda *args, **kwargs: getattr(solution(), name)(*args, **kwargs)


def equals(result: Any, wanted: Any) -> bool:
    """Return whether a result is the expected one of APPS: lists for tuples, or the only item of a list."""
    return is_same(result, wanted) or (
        type(wanted) is list and len(wanted) == 1 and is_same(result, wanted[0])
    )


def is_same(result: Any, wanted: Any) -> bool:
    """Return whether a result is the expected value, which JSON has kept: no tuples, no numbers as keys."""
    if type(result) in (list, tuple) and type(wanted) in (list, tuple):
        return len(result) == len(wanted) and all(map(is_same, result, wanted))
    if type(result) is dict and type(wanted) is dict:
        keys = {str(key) if type(key) is int else key: value for key, value in result.items()}
        return len(keys) == len(wanted) and all(
            key in keys and is_same(keys[key], wanted[key]) for key in wanted
        )
    if type(wanted) is float and type(result) in (int, float):
        return math.isclose(result, wanted, rel_tol=TOLERANCE, abs_tol=1e-9) or (
            result != result and wanted != wanted
        )
    return bool(result == wanted)


def missing(*_: object, **__: object) -> NoReturn:
    """Stand for a name that the program does not define."""
    raise NameError("the program does not define what is tested")


prepare(globals()["namespace"], json.load(sys.stdin))
