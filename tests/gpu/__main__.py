"""`make gpu-proof`: runs the suite on this machine's GPU and prints what each case measured.

Installs nothing. Exit code 0: every case of NEEDS has held; 1: a case has not; 3: the machine has no GPU.
"""

from __future__ import annotations

import argparse
import multiprocessing
import signal
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from rich.console import Console

from async_rl.errors import EnvironmentNotReady
from tests.gpu.machine import PACKAGES, ROOT, describe, describe_code
from tests.gpu.proof import NEEDS, Case, exit_code, read, show, write
from tests.gpu.slices import Slice

_WIDTH = 160
"""Columns of the table where the output is not a terminal of its own width."""


def main() -> int:
    """Run the command and return its exit code."""
    options, begin_s = parse_options(), time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the process that runs the cases, too
    try:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            machine = pool.submit(describe, rehearsal=options.rehearse).result()
    except EnvironmentNotReady as error:
        print(f"gpu-proof: {error}", file=sys.stderr)
        return error.exit_code
    if not options.rehearse and (missing := [name for name in PACKAGES if name not in machine]):
        print(
            f"gpu-proof: not installed: {', '.join(missing)}. Cases that need them will fail: install "
            "requirements/gpu.txt and this project (docs/guide/scaling-up.md)",
            file=sys.stderr,
        )
    path = options.json or ROOT / "runs" / ("gpu-rehearsal.json" if options.rehearse else "gpu-proof.json")
    path = path.resolve()
    code = describe_code()

    def note(case: Case) -> None:
        print(case.line(), flush=True)
        write(part.cases.values(), machine, code, path)

    part = Slice(
        suite=["-k", options.k, str(Path(__file__).parent)],
        log=path.with_suffix(".log"),
        minutes=options.minutes,
        needs=options.needs,
        rehearse=options.rehearse,
        begin_s=begin_s,
        cases={} if options.fresh else read(machine, code, path),
        ended=note,
    )
    if done := sum(case.is_done for case in part.cases.values()):
        print(f"{done} cases of {path} are not run again (FRESH=1 runs them)", flush=True)
    part.run()
    cases = list(part.cases.values())
    write(cases, machine, code, path)
    console = Console() if sys.stdout.isatty() else Console(width=_WIDTH)
    show(cases, ", ".join(f"{name} {value}" for name, value in machine.items()), console)
    print(f"figures: {path}; output of the cases: {part.log}")
    return exit_code(cases, options.needs)


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--json", type=Path, help="results, which later calls add to (runs/gpu-proof.json)")
    parser.add_argument("--minutes", type=float, help="begin no case that may last longer")
    parser.add_argument("--needs", default=",".join(NEEDS), help="run only cases that need nothing else")
    parser.add_argument("--fresh", action="store_true", help="also run what has held in the file")
    parser.add_argument("--rehearse", action="store_true", help="run the code of all cases on a CPU")
    parser.add_argument("-k", default="", help="only the cases whose names match, as in pytest")
    options = parser.parse_args()
    options.needs = options.needs.split(",")
    if unknown := set(options.needs) - set(NEEDS):
        parser.error(f"--needs: {unknown.pop()!r} is none of {', '.join(NEEDS)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
