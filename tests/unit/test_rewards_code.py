"""Programs of the policy against their tests, in the real sandbox."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agent_loops import sandbox
from agent_loops.rewards_code import cases_of, code_tests, program_of
from async_rl.errors import SandboxLost
from tests.support.reward_functions import make_completion
from tests.support.scripted_session import make_task

pytestmark = pytest.mark.real_time

ADD = "def add(a, b):\n    return a + b\n"
SUM = "```python\nprint(sum(map(int, input().split())))\n```"
BIG = "def big(digits):\n    return 10**digits - 1"
SOLUTION = "class Solution:\n    def add(self, a: int, b: Optional[int]) -> List[int]:\n        return a + b"
PRINTED = {"inputs": [""], "outputs": ["3"]}
LATE = (
    "import threading as t\nt.Thread(target=lambda: print(t.main_thread().join() or 3)).start()",
    "from concurrent.futures import *\npool = ThreadPoolExecutor()\npool.submit(print, 3)",
    "import atexit\natexit.register(lambda: 1 / 0)\natexit.register(print, 3)",
    "import sys\nprint(3)\nsys.stdout.close()",
    "file = open(1, 'w', closefd=False)\nfile.write('3')",
)
PAIRS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}


@pytest.mark.needs("namespaces")
@pytest.mark.parametrize(
    ("answer", "text", "reward", "passed"),
    [
        (PAIRS, f"I add them.\n{SUM}\nDone.", 1.0, 1.0),
        (json.dumps(PAIRS), SUM, 1.0, 1.0),
        (PAIRS, "print(3)", 0.0, 0.5),
        ([{"input": "1 2", "output": "3"}], "import sys\nprint('3 ')\nsys.exit()", 1.0, 1.0),
        ({"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, 7]}, ADD, 1.0, 1.0),
        (["assert add(1, 2) == 3", "assert add(1, 2) == 4", "assert add(0, 0) == 0"], ADD, 0.0, 1 / 3),
        ("assert add(2, 2) == 4", f"```\n{ADD}```", 1.0, 1.0),
        ("assert add(2, 2) == 4", "import os\nos._exit(0)", 0.0, 0.0),
        ("assert True", "raise ValueError", 0.0, 0.0),
        (PAIRS, f"{SUM}\nimport sys\nprint('debug', file=sys.stderr)\nx = 1\nx is 1", 1.0, 1.0),
        (PAIRS, "import sys\nprint(sum(map(int, input().split())), file=sys.stderr)", 0.0, 0.0),
        ([{"input": "1 2", "output": "3"}], "print(3)\nexit()", 1.0, 1.0),
        ([{"input": "1 2", "output": "3"}], "print(3)\nquit()", 1.0, 1.0),
        ([{"input": "1 2", "output": "3"}], "print(3)\nraise SystemExit(0)", 1.0, 1.0),
        ([{"input": "", "output": "0.3"}], "print(0.1 + 0.2)", 1.0, 1.0),
        ([{"input": "", "output": "0.3"}], "print(0.31)", 0.0, 0.0),
        ([{"input": "", "output": "3"}], "print(3.0000001)", 0.0, 0.0),
        ([{"input": "", "output": "x 0.5 inf"}], "print('x', .5, float('inf'))", 1.0, 1.0),
        ([{"input": "", "output": "9" * 5000}], "print('9' * 5000)", 1.0, 1.0),
        ([{"input": "", "output": "9" * 5000}], "print(10**5000 - 1)", 1.0, 1.0),
        ({"fn_name": "big", "inputs": [[5000]], "outputs": [10**5000 - 1]}, BIG, 1.0, 1.0),
        (f'{{"fn_name": "big", "inputs": [[5000]], "outputs": [{"9" * 5000}]}}', BIG, 1.0, 1.0),
        ({"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, 7]}, SOLUTION, 1.0, 1.0),
        ({"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [[3], [7]]}, ADD, 1.0, 1.0),
        ({"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [[3], [8]]}, ADD, 0.0, 0.5),
        ({"fn_name": "add", "inputs": [[0.1, 0.2]], "outputs": [0.3]}, ADD, 1.0, 1.0),
        ({"fn_name": "add", "inputs": [[[1], [2]]], "outputs": [[1, 2]]}, ADD, 1.0, 1.0),
        ({"fn_name": "pair", "inputs": [[1]], "outputs": [[1, 2]]}, "def pair(a): return a, 2", 1.0, 1.0),
        (PAIRS, f"<think>In a ```python block.</think>\n{SUM}", 1.0, 1.0),
        (PAIRS, f"<think>{SUM}", 0.0, 0.0),
        *((PRINTED, text, 1.0, 1.0) for text in LATE),
        ({"inputs": [""], "outputs": [10**5000 - 1]}, "print(10**5000 - 1)", 1.0, 1.0),
        ("assert add(2, 2) == 4", f"{ADD}\nif __name__ == '__main__':\n    add(input())", 1.0, 1.0),
    ],
)
async def test_a_program_is_rewarded_when_its_tests_pass(
    answer: Any, text: str, reward: float, passed: float
) -> None:
    assert await code_tests(make_task(answer=answer), make_completion(text)) == {
        "reward": reward,
        "passed": passed,
    }


HUMAN_EVAL = """
METADATA = {}

def check(candidate):
    assert candidate([1.0, 2.0]) == [2.0, 4.0]
    assert abs(candidate([0.1])[0] - 0.2) < 1e-6
    for n in range(20):
        assert candidate([n]) == [2 * n], n
check(double)
"""
DOUBLE = "def double(numbers):\n    return [2 * number for number in numbers]"


@pytest.mark.needs("namespaces")
@pytest.mark.parametrize(
    ("tests", "program"),
    [
        pytest.param([HUMAN_EVAL], DOUBLE, id="HumanEval"),
        pytest.param(["assert sum(10, 15) == 6"], "def sum(a, b): return 6", id="named like a builtin"),
        pytest.param(
            ["assert set(common((3, 4), (4, 5))) == set((4,))"],
            "def common(a, b): return tuple({*a} & {*b})",
            id="MBPP",
        ),
        pytest.param(
            [
                "assert math.isclose(half(3), 1.5, rel_tol=0.001)",
                "assert Counter(half('ab')) == Counter('a')",
            ],
            "def half(n): return n / 2 if n == 3 else n[:1]",
            id="modules of the tests",
        ),
        pytest.param(
            [
                "import math",
                "pi = math.pi",
                "def near(a, b): return abs(a - b) < 0.01",
                "assert near(tau(), 2 * pi)",
            ],
            "def tau(): return 6.283",
            id="definitions of the tests",
        ),
        pytest.param(
            {"fn_name": "Solution().twice", "inputs": [[[1]]], "outputs": [[1, 1]]},
            "class Solution:\n    def twice(self, x): return x + x",
            id="a method",
        ),
        pytest.param(
            [
                "s = Stack()",
                "s.push(4)",
                "assert s.pop() == 4",
                "assert s.items == [] and len(s) == 0",
                "assert str(s) == '<>'",
            ],
            "class Stack:\n    def __init__(self): self.items = []\n"
            "    def push(self, n): self.items.append(n)\n"
            "    def pop(self): return self.items.pop()\n    def __len__(self): return len(self.items)\n"
            "    def __str__(self): return '<>'",
            id="a class",
        ),
        pytest.param(
            ["try:\n    root(-1)\n    assert False\nexcept ValueError:\n    pass"],
            "class Negative(ValueError): pass\ndef root(n): raise Negative(n)",
            id="an expected error",
        ),
        pytest.param(
            ["assert list(squares(3)) == [0, 1, 4]", "assert 4 in squares(3)"],
            "def squares(n):\n    for i in range(n): yield i * i",
            id="a generator",
        ),
        pytest.param(
            [
                "assert same({'a': (1, [2.5]), 3: {4}, None: b'x'}) == {'a': (1, [2.5]), 3: {4}, None: b'x'}",
                "assert same(1 << 4000) == 1 << 4000 and same(-(1 << 99)) == -(1 << 99)",
                "assert same(2 + 3j) == 2 + 3j",
                "assert same(float('inf')) > 1e308 and same(float('nan')) != same(float('nan'))",
                "assert type(same(True)) is bool and same(frozenset('a')) == {'a'} and same(x=None) is None",
                "assert LIMIT == 5",
            ],
            "LIMIT = 5\ndef same(x): return x",
            id="types",
        ),
        pytest.param(
            ["assert run() == 3"],
            "import asyncio\nasync def three(): return 3\n"
            "def run():\n    print('noise')\n    return asyncio.run(three())",
            id="a program that prints",
        ),
    ],
)
async def test_an_honest_program_passes_when_tests_have_a_usual_form(tests: Any, program: str) -> None:
    scores = await code_tests(make_task(answer=tests), make_completion(program), partial=True, wall_s=60)
    assert scores["passed"] == 1.0


@pytest.mark.needs("namespaces")
@pytest.mark.parametrize(
    ("test", "error"),
    [("assert apply(lambda n: n, 3) == 3", "passes a function"), ("assert apply(", "SyntaxError")],
)
async def test_tests_that_cannot_run_are_an_error_of_the_task(test: str, error: str) -> None:
    with pytest.raises(ValueError, match=rf"the tests in the answer cannot run.*{error}"):
        await code_tests(make_task(answer=[test]), make_completion("def apply(f, n): return f(n)"))


@pytest.mark.needs("namespaces")
async def test_the_share_is_rewarded_when_the_config_says_so() -> None:
    answer = ["assert add(1, 2) == 4", "assert add(1, 2) == 3"]
    scores = await code_tests(make_task(answer=answer), make_completion(ADD), partial=True)
    assert scores == {"reward": 0.5, "passed": 0.5}
    scores = await code_tests(make_task(answer=answer[::-1]), make_completion(ADD), max_tests=1)
    assert scores["reward"] == 1.0


@pytest.mark.needs("namespaces")
async def test_a_program_that_hangs_fails_its_tests_alone() -> None:
    task = make_task(answer="assert True")
    assert (await code_tests(task, make_completion("while True: pass"), wall_s=0.5))["reward"] == 0.0
    assert (await code_tests(task, make_completion("pass"), wall_s=30))["reward"] == 1.0


@pytest.mark.needs("namespaces")
@pytest.mark.parametrize(
    "start", ["exit 1", "echo cannot fork; exit 127", "kill -9 $$", "cat > /dev/null"], ids=str
)
@pytest.mark.parametrize(
    "answer", ["assert True", {"inputs": [""], "outputs": ["1"]}], ids=["assert", "print"]
)
async def test_a_sandbox_that_does_not_start_is_no_failed_test(
    monkeypatch: pytest.MonkeyPatch, start: str, answer: Any
) -> None:
    limits = {"wall_s": 0.5}
    await code_tests(make_task(answer="assert True"), make_completion("pass"), **limits)  # it was checked
    monkeypatch.setattr(sandbox, "sandbox_command", lambda _, **options: (["/bin/sh", "-c", start], None))
    monkeypatch.setattr(sandbox, "START_S", 1.0)
    with pytest.raises(SandboxLost, match="sandbox"):
        await code_tests(make_task(answer=answer), make_completion("print(1)"), **limits)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        *((answer, "holds no tests") for answer in (None, "[]", {"inputs": []}, 4, [3])),
        pytest.param(10**5000, "holds no tests", id="long"),
        ({"inputs": ["1", "2"], "outputs": ["1"]}, "has 2 inputs and 1 outputs; expected as many"),
        ({"fn_name": "f", "inputs": [], "outputs": [1]}, "has 0 inputs and 1 outputs"),
        ([{"input": "1", "output": "1", "testtype": "functional"}], "do not name the function"),
        (
            [{"input": "1", "output": "1"}, {"input": "2"}],
            r"test 2 of the answer is \{'input': '2'\}; expected",
        ),
        ([{"input": "1"}, {"input": "2", "output": "2"}], "test 1 of the answer"),
        (["assert True", 3], "test 2 of the answer is 3; expected input and output, or an assertion"),
    ],
)
def test_an_answer_without_usable_tests_is_an_error(answer: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        cases_of(answer)


PYTHONS = (
    "python3.11",
    "python2",
    "{.python}",
    "python:a.py",
    "python,ignore",
    'python title="x"',
    "{python}",
)


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\na\n```\nbetter:\n```py\nb\n```", "b\n"),
        ("```\ncut short", "cut short"),
        ("print(1)", "print(1)"),
        ("```text\n1 2\n```\n```python\na\n```", "a\n"),
        ("```python3\na\n```", "a\n"),
        ("```Python\na\n```", "a\n"),
        ("```python\na\n```\nRun it:\n```bash\npython a.py\n```", "a\n"),
        ("```python\na\n```\nIt prints:\n```\n3\n```", "a\n"),
        ("```\na\n```\n```json\n{}\n```", "a\n"),
        ('~~~python title="a.py"\na\n~~~', "a\n"),
        ("````python\na = 1\n```\nb\n````", "a = 1\n```\nb\n"),
        ("1. So:\n   ```python\n   if a:\n       b\n   ```", "if a:\n    b\n"),
        ("Use ```x``` here.\n```python\na\n```", "a\n"),
        ("```python\r\na\r\n```\r\n", "a\n"),
        ("```python\na\n", "a"),
        ("I use ```python blocks.\n```python\na\n```", "a\n"),
        ("Use ```, as here:\n```python\na\n```", "a\n"),
        ("By `x`: ```python\na\n```", "a\n"),
        *((f"```{name}\na\n```\n```text\nb\n```", "a\n") for name in PYTHONS),
        *((f"```{name}\na\n```", f"```{name}\na\n```") for name in ("pycon", "python-repl", "c++")),
        *((f"```py\na\n```{behind}\nb", "a\n") for behind in ("</answer>", "<|im_end|>", " So", ".")),
        ("- ```python\n  if a:\n      b\n  ```", "if a:\n    b\n"),
        ("1. ```python\na\n```", "a\n"),
        ("> ```python\n> if a:\n>     b\n> ```\nSo.", "if a:\n    b\n"),
        ("```python\na\n```\n```python\n\n```", "a\n"),
        ("\ufeffa", "a"),
        ("\ufeff```python\n\ufeffa\n```", "a\n"),
        ('```python\na = """\n```text\n"""\n```', 'a = """\n```text\n"""\n'),
        ("` " * 50_000, "` " * 50_000),
    ],
    ids=lambda text: text[:20],
)
def test_the_last_block_is_the_program(text: str, program: str) -> None:
    assert program_of(text) == program
