"""`python -m tests.chaos --seed 0 --minutes 5`, also `make chaos`: kills processes of a real run."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.chaos.harness import ROOT, Chaos, Violation, make_config
from tests.chaos.plan import Blow, blows

LAST_START_S = 75.0
"""Time reserved for the last start and its steps."""


def main() -> int:
    """Runs the command; returns 0 if every check passed."""
    parser = argparse.ArgumentParser(description="The real loop on this CPU while its processes are killed.")
    parser.add_argument("--seed", type=int, default=0, help="what is done to whom, and how the run is set")
    parser.add_argument("--minutes", type=float, default=5.0, help="how long, about")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="async-rl-chaos-"))
    for script, words in (("make_model.py", ["model"]), ("make_data.py", ["data"])):
        subprocess.run(
            [sys.executable, ROOT / "examples/calculator" / script, *words], cwd=folder, check=True
        )
    tree = make_config(
        folder,
        folder / "model",
        folder / "data" / "tasks.jsonl",
        arguments.seed,
        num_engines=arguments.engines,
        num_ranks=arguments.ranks,
    )
    print(
        f"seed {arguments.seed}: {tree['weights']} {tree['routing']}; everything is in {folder}", flush=True
    )
    deadline = time.monotonic() + 60 * arguments.minutes - LAST_START_S

    def in_time() -> Iterator[Blow]:
        for blow in blows(arguments.seed):
            if time.monotonic() > deadline:
                return
            yield blow

    repeat = f"make chaos SEED={arguments.seed} MINUTES={arguments.minutes:g}"
    try:
        findings = Chaos(folder, tree, lambda line: print(line, flush=True)).run(in_time(), arguments.seed)
    except (Violation, AssertionError) as error:
        print(f"\nVIOLATED: {error}\n\nrepeat it: {repeat}\nwhat is left of it: {folder}")
        return 1
    print()
    for finding in findings:
        print(f"{'held' if finding.holds else 'VIOLATED':8}  {finding.check:48}  {finding.detail}")
    if not all(finding.holds for finding in findings):
        print(f"\nrepeat it: {repeat}\nwhat is left of it: {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
