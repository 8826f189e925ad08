"""Scores a workspace: 0 if all calls of the task's answer have the expected results, else 1, as exit code.

Each call runs in a process of its own, so that the tested code cannot end or change this one. The results are
compared here: the tested process never sees what is expected.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

CALL = """
import json, sys
sys.path.insert(0, sys.argv[1])
import solution
print("\\n" + json.dumps(getattr(solution, sys.argv[2])(*json.loads(sys.argv[3]))))
"""
CALL_S = 10


def is_right(function: str, arguments: list[object], expected: object) -> bool:
    """Return whether a call has the expected result."""
    command = [sys.executable, "-I", "-c", CALL, os.environ["WORKSPACE"], function, json.dumps(arguments)]
    try:
        ran = subprocess.run(command, stdout=subprocess.PIPE, timeout=CALL_S, check=True, text=True)
        return bool(json.loads(ran.stdout.splitlines()[-1]) == expected)
    except (subprocess.SubprocessError, ValueError, IndexError):
        return False


task = json.load(sys.stdin)
sys.exit(0 if all(is_right(*call) for call in task["answer"]) else 1)
