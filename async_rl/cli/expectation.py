"""A program that a run starts beside itself, rarely: what should the run reach, and why does it not?

Usage: expectation.py rate  FOLDER FIRST_STEP ENGINES     {"tokens_per_s": 1234.5}
       expectation.py cause FOLDER FIRST_STEP EXPECTED    {"causes": ["engine-3 decodes a token …"]}

`rate` takes the record of the steps from FIRST_STEP on, which is kept in the run's folder: later rates, for
other numbers of engines, and later causes are found by the same record. The program takes the lowest
priority, ends with the run, and has limited CPU time.
"""

from __future__ import annotations

import logging
import os
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from async_rl.cli.plan import coarsening
from async_rl.cli.what_if import HOW, check_expressible
from async_rl.errors import ConfigError
from async_rl.planning.past_run import PastRun, read_past_run
from async_rl.planning.run_comparison import causes_of, expected_rate, parts_of
from async_rl.planning.run_fit import slow_engines
from async_rl.planning.workload import with_engines
from async_rl.run.plan_watch import RECORD
from async_rl.runtime.files import replace_file
from async_rl.runtime.printable import print_text
from async_rl.runtime.processes import die_with_parent

_CPU_S: Final = 300
"""Seconds of CPU after which the kernel ends this program. A fit of 1000 trajectories takes about 20."""


def answer(question: str, folder: Path, first_step: int, number: float) -> dict[str, Any]:
    """Return the answer to one of the program's questions.

    Raises:
        ConfigError: The run's record does not suffice, or a simulation cannot express it.
    """
    file = folder / RECORD
    if question == "cause":
        before, past = _kept_record(file), read_past_run(folder, first_step)
        slow = slow_engines(past.calls)
        return {"causes": causes_of(parts_of(before), parts_of(past), number, slow)}
    if file.exists():
        past = _kept_record(file)
    else:
        past = read_past_run(folder, first_step)
        check_expressible(past)
        past = replace(past, config=with_engines(past.config, int(number)))  # those that served
        file.parent.mkdir(exist_ok=True)
        replace_file(file, msgspec.json.encode(past), mode=0o600)
    how = replace(HOW, coarsen=coarsening(past.config))
    return {"tokens_per_s": expected_rate(past, int(number), how)}


def _kept_record(file: Path) -> PastRun:
    return msgspec.json.decode(file.read_bytes(), type=PastRun)


def main(arguments: Sequence[str]) -> int:
    """Print the answer as JSON; return the exit code."""
    die_with_parent()
    os.nice(19)
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))
    logging.disable()
    question, folder, first_step, number = arguments
    try:
        found = answer(question, Path(folder), int(first_step), float(number))
    except ConfigError as error:
        print_text(str(error), file=sys.stderr)
        return 2
    print_text(msgspec.json.encode(found).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
