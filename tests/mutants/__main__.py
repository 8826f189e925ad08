"""Runs the mutants and prints a table: `python -m tests.mutants`, also `make mutants`."""

from __future__ import annotations

import argparse
import queue
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutants.harness import Result, Tree
from tests.mutants.table import MUTANTS, Mutant


def main() -> int:
    """Runs the command. Returns 0 when every mutant was killed."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these mutants (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time, each in a copy of its own")
    parser.add_argument("--list", action="store_true", help="print what there is, and run nothing")
    parser.add_argument(
        "--verbose", action="store_true", help="print what pytest said where it is not killed"
    )
    options = parser.parse_args()
    known = {mutant.name for mutant in MUTANTS}
    if strange := sorted(set(options.only or ()) - known):
        parser.error(f"no such mutant: {', '.join(strange)}")
    chosen = [mutant for mutant in MUTANTS if not options.only or mutant.name in options.only]
    if options.list:
        for mutant in chosen:
            print(f"{mutant.name:<42} {mutant.file:<40} {mutant.breaks}")
        return 0
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="async-rl-mutants-") as folder:
        trees: queue.SimpleQueue[Tree] = queue.SimpleQueue()
        for number in range(options.jobs):
            trees.put(Tree(Path(folder) / str(number)))
        unchanged = _run_unchanged(trees, chosen)
        print(f"{'without a mutant':<42} {unchanged.seconds:5.1f} s  {unchanged.detail or 'all tests pass'}")
        if unchanged.verdict == "error":
            print(unchanged.output)
            return 1
        with ThreadPoolExecutor(options.jobs) as threads:
            results = threads.map(lambda mutant: _try(trees, mutant), chosen)
            counts = dict.fromkeys(("killed", "survived", "error"), 0)
            for mutant, result in zip(chosen, results, strict=True):
                counts[result.verdict] += 1
                print(
                    f"{mutant.name:<42} {result.seconds:5.1f} s  {result.verdict:<8}  {result.detail}",
                    flush=True,
                )
                if options.verbose and result.verdict != "killed":
                    print(result.output)
    took_s = time.monotonic() - begin_s
    print(
        f"{len(chosen)} mutants in {took_s:.0f} s: " + ", ".join(f"{n} {what}" for what, n in counts.items())
    )
    return int(counts["killed"] < len(chosen))


def _run_unchanged(trees: queue.SimpleQueue[Tree], chosen: list[Mutant]) -> Result:
    tree = trees.get()
    result = tree.run_unchanged(sorted({test for mutant in chosen for test in mutant.tests}))
    trees.put(tree)
    return result


def _try(trees: queue.SimpleQueue[Tree], mutant: Mutant) -> Result:
    tree = trees.get()
    try:
        return tree.try_mutant(mutant)
    finally:
        trees.put(tree)


if __name__ == "__main__":
    sys.exit(main())
