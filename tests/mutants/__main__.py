"""Runs the mutants and prints a table: `python -m tests.mutants`, also `make mutants`."""

from __future__ import annotations

import argparse
import queue
import random
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutants.harness import Result, Tree
from tests.mutants.table import MUTANTS, Mutant


def main() -> int:
    """Runs the command. Returns 0 when every mutant that was tried was killed, and at least one was."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these mutants (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time, each in a copy of its own")
    parser.add_argument(
        "--minutes", type=float, metavar="N", help="begin no mutant later (default: no limit)"
    )
    parser.add_argument(
        "--order", metavar="TEXT", help="shuffle them by this text (default: as in the table)"
    )
    parser.add_argument("--list", action="store_true", help="print what there is, and run nothing")
    parser.add_argument(
        "--verbose", action="store_true", help="print what pytest said where it is not killed"
    )
    options = parser.parse_args()
    known = {mutant.name for mutant in MUTANTS}
    if strange := sorted(set(options.only or ()) - known):
        parser.error(f"no such mutant: {', '.join(strange)}")
    chosen = [mutant for mutant in MUTANTS if not options.only or mutant.name in options.only]
    if options.order is not None:
        random.Random(options.order).shuffle(chosen)
    if options.list:
        for mutant in chosen:
            print(f"{mutant.name:<42} {mutant.file:<40} {mutant.breaks}")
        return 0
    begin_s = time.monotonic()
    end_s = begin_s + 60 * (float("inf") if options.minutes is None else options.minutes)
    counts = dict.fromkeys(("killed", "survived", "error"), 0)
    failed: list[str] = []
    with (
        tempfile.TemporaryDirectory(prefix="async-rl-mutants-") as folder,
        ThreadPoolExecutor(options.jobs) as threads,
    ):
        trees: queue.SimpleQueue[Tree] = queue.SimpleQueue()
        for number in range(options.jobs):
            trees.put(Tree(Path(folder) / str(number)))
        results = threads.map(lambda mutant: _try_mutant(trees, mutant, end_s), chosen)
        for mutant, result in zip(chosen, results, strict=True):
            if result is None:
                continue
            counts[result.verdict] += 1
            line = f"{mutant.name:<42} {result.seconds:5.1f} s  {result.verdict:<8}  {result.detail}"
            print(line, flush=True)
            if result.verdict != "killed":
                failed.append(line)
                if options.verbose:
                    print(result.output)
    tried, took_s = sum(counts.values()), time.monotonic() - begin_s
    if failed:  # once more, where the end of a long log has them
        print("\nnot killed:", *failed, sep="\n")
    verdicts = ", ".join(f"{number} {what}" for what, number in counts.items())
    print(f"{tried} of {len(chosen)} mutants in {took_s:.0f} s: {verdicts}")
    return int(counts["killed"] < max(tried, 1))


def _try_mutant(trees: queue.SimpleQueue[Tree], mutant: Mutant, end_s: float) -> Result | None:
    """Tries a mutant in a free tree, or returns None when the time is up."""
    if time.monotonic() >= end_s:
        return None
    tree = trees.get()
    try:
        return tree.try_mutant(mutant)
    finally:
        trees.put(tree)


if __name__ == "__main__":
    sys.exit(main())
