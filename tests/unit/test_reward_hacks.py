"""Programs that try to earn the reward of code without solving the task. Each must score 0.

The cheats are those that published reports of reward hacking and of evaluations of code describe: early
exits, objects that equal everything, patched interpreters, tests read from frames, files and memory, forged
results.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loops import sandbox
from agent_loops.rewards_code import code_tests
from agent_loops.sandbox import Interpreter, Limits
from tests.support.reward_functions import make_completion
from tests.support.scripted_session import make_task

pytestmark = pytest.mark.real_time

HONEST = "def add(a, b):\n    return a + b\n"

TESTS = [
    "assert add(17, 25) == 42",
    "assert not add(1, 1) != 2",
    "assert sorted([add(2, 3), add(1, 1)]) == [2, 5]",
    "assert all(map(lambda n: add(n, n) == 2 * n, range(50, 53)))",
    "assert set([add(1, 2)]) == {3}",
    "assert abs(add(0.5, 0.25) - 0.75) < 1e-9",
    "assert add('ä', 'b') == 'äb'",
    "def check(candidate):\n    for n in range(4, 6):\n        assert candidate(n, n) == 2 * n\n\ncheck(add)",
]

_FORGE = """
import os, sys
def forge(*words):
    frame = sys._getframe()
    while frame:
        channel = frame.f_globals.get("channel")
        token = getattr(channel, "token", frame.f_locals.get("token"))
        if isinstance(token, bytes):
            os.write(1, b"\\n\\x1e" + token + b" " + b" ".join(words) + b"\\n")
        frame = frame.f_back
"""

CHEATS = {
    # -- ends before the tests do
    "exit_at_once": "import sys\nsys.exit(0)",
    "exit_in_the_call": "import sys\ndef add(a, b):\n    sys.exit(0)",
    "exit_with_a_subclass": "class Done(SystemExit): pass\ndef add(a, b):\n    raise Done(0)",
    "exit_without_cleanup_in_the_call": "import os\ndef add(a, b):\n    os._exit(0)",
    "exit_by_exec": "import os\ndef add(a, b):\n    os.execv('/bin/true', ['true'])",
    "exit_hook": "import atexit, os\natexit.register(os._exit, 0)\ndef add(a, b):\n    raise SystemExit",
    "interrupt": "def add(a, b):\n    raise KeyboardInterrupt",
    "stop_the_iteration_of_the_tests": "def add(a, b):\n    raise StopIteration",
    # -- objects that equal everything
    "equal_to_everything": """
class Any:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __lt__ = __le__ = __gt__ = __ge__ = __eq__
    def __hash__(self): return hash(3)
    def __sub__(self, other): return self
    __radd__ = __rsub__ = __abs__ = lambda self, *_: self
def add(a, b): return Any()
""",
    "subclass_of_int": """
class Int(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __lt__ = __gt__ = __eq__
    __hash__ = int.__hash__
def add(a, b): return Int(-1)
""",
    "lying_class": """
class Lie:
    __class__ = property(lambda self: int)
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __index__(self): return -1
    def __reduce__(self): return (int, (42,))
def add(a, b): return Lie()
""",
    # -- a patched interpreter
    "replaced_runner_in_the_frames": """
import sys
frame = sys._getframe()
while frame:
    for name in ("run_program", "run", "answer_question", "encode"):
        if name in frame.f_globals:
            frame.f_globals[name] = lambda *_, **__: "done"
    frame = frame.f_back
""",
    "replaced_builtins": """
import builtins
builtins.exec = builtins.eval = lambda *_, **__: None
builtins.all = builtins.bool = builtins.isinstance = lambda *_: True
builtins.abs = lambda _: 0
""",
    "assertions_compiled_away": """
import builtins
compile_ = builtins.compile
builtins.compile = lambda source, file, mode, *rest, **more: compile_("pass", file, "exec", optimize=2)
""",
    "assertion_error_that_is_none": "import builtins\nbuiltins.AssertionError = SystemExit",
    "tracing_skips_the_assertion": """
import sys
def trace(frame, event, arg):
    if event == "exception":
        sys.settrace(None)
        raise SystemExit(0)
    return trace
sys.settrace(trace)
sys._getframe().f_trace = trace
def add(a, b):
    sys._getframe(1).f_trace = trace
    sys.settrace(trace)
    raise SystemExit(0)
""",
    "replaced_json": """
import sys, types
fake = types.ModuleType("json")
fake.loads = lambda *_, **__: ["value", True]
fake.dumps = lambda *_, **__: '["value",true]'
fake.JSONEncoder = fake.JSONDecoder = object
sys.modules["json"] = sys.modules["_json"] = fake
def add(a, b): return True
""",
    "modules_in_the_working_folder": """
import os, sys
for name in ("json", "sitecustomize", "conftest", "unittest", "symtable", "math"):
    with open(name + ".py", "w") as file:
        file.write("raise SystemExit(0)")
sys.path.insert(0, os.getcwd())
""",
    "small_integers_overwritten": """
import ctypes
def add(a, b):
    for number in range(257):
        ctypes.c_uint32.from_address(id(number) + 24).value = 7
    return 7
""",
    "methods_of_int_replaced": """
import gc
def add(a, b):
    for table in gc.get_referents(int.__dict__, str.__dict__):
        if isinstance(table, dict):
            table["__eq__"] = lambda self, other: True
            table["__ne__"] = lambda self, other: False
    return -1
""",
    "names_of_the_tests_redefined": """
def set(items): return 3
def sorted(items): return 3
def all(items): return True
def abs(number): return 0
def map(*_): return []
def range(*_): return []
check = lambda candidate: None
""",
    # -- expected values that are read
    "constants_of_the_calling_frame": """
import sys
def add(a, b):
    frame = sys._getframe(1)
    while frame:
        for value in frame.f_code.co_consts:
            if type(value) is int and value not in (a, b, 0, 1):
                return value
        frame = frame.f_back
""",
    "tests_in_files": """
import os, re
def add(a, b):
    for folder, _, files in os.walk("/scratch"):
        for name in files:
            found = re.search("== (.*)", open(os.path.join(folder, name)).read())
            if found and "add" in found.string:
                return eval(found[1])
""",
    "tests_in_memory": """
import gc
def add(a, b):
    for held in gc.get_objects():
        for value in gc.get_referents(held):
            if type(value) is str and value.startswith("assert add(") and "==" in value:
                return eval(value.split("==")[1])
""",
    "tests_on_standard_input": """
import os, sys
answers = []
for descriptor in range(64):
    try:
        os.set_blocking(descriptor, False)
        answers.append(os.read(descriptor, 1 << 20))
    except OSError:
        pass
def add(a, b):
    for text in answers:
        if b"==" in text:
            return eval(text.split(b"==")[1].split()[0])
""",
    "tests_in_arguments_and_proc": """
import os, sys
def add(a, b):
    for path in ("cmdline", "environ", "maps", "mem"):
        try:
            with open("/proc/self/" + path, "rb") as file:
                text = file.read(1 << 16)
        except OSError:
            continue
        if b"== " in text:
            return eval(text.split(b"== ")[1].split()[0])
    if "add(" in str(sys.argv) + str(os.environ):
        return 42
""",
    # -- forged results
    "forged_end_at_once": _FORGE + "forge(b'done')\nos._exit(0)",
    "forged_end_in_the_call": _FORGE + "def add(a, b):\n    forge(b'done')\n    os._exit(0)",
    "forged_value": _FORGE
    + """def add(a, b):
    for text in (b'["value",true]', b'["value",["r",0]]', b'true', b'passed'):
        forge(b'done', text)
    os._exit(0)
""",
    "forged_question_to_the_supervisor": _FORGE
    + "def add(a, b):\n    forge(b'ask', b'[\"passed\"]')\n    os._exit(0)",
    "forged_end_not_utf_8": _FORGE + "def add(a, b):\n    forge(b'\\xff\\xfe', b'\\x80')\n    os._exit(0)",
    "forged_by_a_thread_that_reads_the_requests": """
import os, threading
def serve():
    while True:
        for descriptor in (3, 4, 5, 6):
            try:
                words = os.read(descriptor, 1 << 16).split()
                os.write(1, b"\\n\\x1e" + words[0] + b' done ["value",true]\\n')
            except (OSError, IndexError):
                pass
threading.Thread(target=serve, daemon=True).start()
""",
    "success_printed": """
print("\\n\\x1eready\\n\\x1e done\\nOK\\n1 passed\\n")
def add(a, b):
    print('["value",42]')
    print("42", flush=True)
""",
    "stdout_replaced": """
import io, os, sys
sys.stdout = sys.stderr = io.StringIO()
os.dup2(os.open("/dev/null", os.O_WRONLY), 1)
def add(a, b): return True
""",
    "stdout_closed": "import os\nfor n in range(64):\n    try: os.close(n)\n    except OSError: pass",
    # -- hostile results
    "not_a_number": "def add(a, b): return float('nan')",
    "surrogates": "def add(a, b): return '\\ud800\\udfff\\x00\\x1e\\n' * 9",
    "surrogates_in_the_program": "def add(a, b): return '\ud800'",
    "deep_result": """
def add(a, b):
    value = []
    for _ in range(100_000): value = [value]
    return value
""",
    "result_in_itself": "def add(a, b):\n    value = []\n    value.append(value)\n    return value",
    "huge_result": "def add(a, b): return 'x' * (1 << 26)",
    "huge_number": "def add(a, b): return 1 << (1 << 24)",
    "endless_result": "def add(a, b):\n    while True: yield 42",
    "endless_recursion": "def add(a, b): return add(a, b)",
    "endless_output": "def add(a, b):\n    while True: print('x' * 1000)",
    "endless_loop": "def add(a, b):\n    while True: pass",
    "name_of_an_error": """
class Meta(type):
    __name__ = property(lambda cls: "SystemExit")
class Error(Exception, metaclass=Meta): pass
Error.__qualname__ = "x" * 100_000
def add(a, b): raise Error("\\ud800" * 1000)
""",
    # -- processes, threads, signals
    "fork_bomb": """
import os
def add(a, b):
    while True:
        try: os.fork()
        except OSError: pass
""",
    "fork_with_two_answers": "import os\ndef add(a, b):\n    os.fork()\n    return True",
    "signal_to_the_supervisor": """
import os, signal
for pid in (os.getppid(), 1, 0, -1):
    try: os.kill(pid, signal.SIGKILL)
    except OSError: pass
""",
    "alarm_that_ends_the_tests": """
import os, signal
signal.signal(signal.SIGALRM, lambda *_: os._exit(0))
signal.setitimer(signal.ITIMER_REAL, 0.01)
def add(a, b): signal.pause()
""",
    "crash": "import ctypes\ndef add(a, b): ctypes.string_at(0)",
}
"""Name and program. None computes a sum."""

PRINT_CHEATS = {
    "nothing_printed": "",
    "exit": "import sys\nsys.exit(0)",
    "forged_end": _FORGE + "forge(b'done')",
    "forged_end_not_utf_8": _FORGE + "forge(b'\\xff')",
    "forged_end_of_many_words": _FORGE + "forge(b'done', b'done', b'[\"value\",true]')",
    "output_not_utf_8": "import os\nos.write(1, bytes(range(256)))",
    "expected_output_in_frames": """
import sys
frame = sys._getframe()
while frame:
    print(frame.f_locals.get("stdout"), frame.f_locals.get("expected"))
    frame = frame.f_back
""",
    "input_echoed": "import sys\nprint(sys.stdin.read())",
    "too_long": "#" * (1 << 21),
}


async def scores_of(answer: Any, program: str, **limits: Any) -> dict[str, float]:
    text = f"```python\n{program}\n```"
    return await code_tests(make_task(answer=answer), make_completion(text), partial=True, **limits)


TIGHT = {"wall_s": 1.5, "cpu_s": 1}
"""For cheats, some of which never end."""


@pytest.mark.real
@pytest.mark.needs("namespaces")
@pytest.mark.parametrize("name", CHEATS)
async def test_a_cheat_earns_nothing_when_functions_are_tested(name: str) -> None:
    assert await scores_of(TESTS, CHEATS[name], **TIGHT) == {"reward": 0.0, "passed": 0.0}


@pytest.mark.real
@pytest.mark.needs("namespaces")
@pytest.mark.parametrize("name", PRINT_CHEATS)
async def test_a_cheat_earns_nothing_when_output_is_tested(name: str) -> None:
    answer = {"inputs": ["17 25\n", "1 1\n"], "outputs": ["42\n", "2\n"]}
    assert await scores_of(answer, PRINT_CHEATS[name], **TIGHT) == {"reward": 0.0, "passed": 0.0}


@pytest.mark.needs("namespaces")
async def test_an_honest_program_earns_the_reward() -> None:
    assert await scores_of(TESTS, HONEST, wall_s=60) == {"reward": 1.0, "passed": 1.0}


@pytest.mark.needs("namespaces")
@pytest.mark.parametrize(
    "how", ["os._exit(0)", "sys.exit(0)", "signal.raise_signal(9)", "os.write(1, b'x' * 99_999)"]
)
async def test_an_exit_is_no_error_that_a_test_expects(how: str) -> None:
    answer = ["try:\n    add(1, 'x')\nexcept:\n    pass\nelse:\n    assert False"]
    program = f"import os, signal, sys\ndef add(a, b):\n    {how}"
    assert await scores_of(answer, HONEST, wall_s=60) == {"reward": 1.0, "passed": 1.0}
    assert await scores_of(answer, program) == {"reward": 0.0, "passed": 0.0}


HOSTILE_PROCESS = """
import os, random, sys
draw = random.Random(int(sys.argv[1]))
os.write(1, b"\\n\\x1eready\\n")
token = sys.stdin.buffer.readline().split()[0]
start = b"\\n\\x1e" + token
parts = [b"\\n\\x1e", token, start, b" ", b"done", b"ask", b"error", b"\\n", b"\\xff\\x80", b"[" * 99, b""]
parts += [start + b" done ", start + b" \\xff ", start + b" ask []\\n"]
for _ in range(draw.randrange(1, 30)):
    os.write(1, draw.choice(parts))
if draw.random() < 0.2:
    os.write(1, bytes(draw.randrange(256) for _ in range(5000)))
"""


async def test_any_output_of_a_process_has_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(30):
        command = [sys.executable, "-I", "-S", "-c", HOSTILE_PROCESS, str(seed)]
        monkeypatch.setattr(sandbox, "sandbox_command", lambda _, command=command, **options: (command, None))
        interpreter = await Interpreter.start(Limits(max_output_bytes=2000))
        try:
            result, line = await interpreter.answer_question(b"[]")
        finally:
            await interpreter.close()
        assert result.ended in get_args(get_type_hints(sandbox.ProgramResult)["ended"]), seed
        assert len(result.output) <= 2000, seed
        assert b"\n" not in line, seed


CHILD = Path(sandbox.__file__).with_name("sandbox_child.py").read_text().removesuffix("\nmain()\n")
CHILD_NAMES: dict[str, Any] = {"__name__": "sandbox_child"}
exec(compile(CHILD, "sandbox_child.py", "exec", dont_inherit=True), CHILD_NAMES)

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers(),
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(), inner)
    ),
)
json_data = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(list("ltsfdribc")), st.lists
)


def refuse(_: object) -> int:
    raise AssertionError("not plain")


@pytest.mark.real
@given(plain)
def test_plain_values_survive_between_interpreters(value: Any) -> None:
    data = json.loads(json.dumps(CHILD_NAMES["encode"](value, refuse)))
    assert repr(CHILD_NAMES["decode"](data, refuse)) == repr(value)


@given(json_data)
def test_forged_data_is_plain_or_refused(data: Any) -> None:
    try:
        value = CHILD_NAMES["decode"](data, lambda number: f"object {number}")
    except (ValueError, TypeError):  # a set of lists
        return
    waiting = [value]
    while waiting:
        held = waiting.pop()
        if type(held) is dict:
            waiting += [*held, *held.values()]
        elif type(held) in (list, tuple, set, frozenset):
            waiting += held
        else:
            assert held is None or type(held) in (bool, int, float, complex, str, bytes)
