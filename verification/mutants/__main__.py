"""Tries the mutants and prints a table: `python -m verification.mutants`, also `make mutants`."""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from verification.mutants.harness import try_mutant
from verification.mutants.table import MUTANTS


def main() -> int:
    """Run the command. Returns 0 when every mutant was killed, and at least one was tried."""
    parser = argparse.ArgumentParser(prog="python -m verification.mutants", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these mutants (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    options = parser.parse_args()
    if strange := sorted(set(options.only or ()) - MUTANTS.keys()):
        parser.error(f"no such mutant: {', '.join(strange)}")
    chosen = [mutant for name, mutant in MUTANTS.items() if not options.only or name in options.only]
    begin_s, counts = time.monotonic(), dict.fromkeys(("killed", "survived", "error"), 0)
    failed: list[str] = []
    with ThreadPoolExecutor(options.jobs) as threads:
        for mutant, result in zip(chosen, threads.map(try_mutant, chosen), strict=True):
            counts[result.verdict] += 1
            line = f"{mutant.name:<40} {result.seconds:5.1f} s  {result.verdict:<8}  {result.detail}"
            print(line, flush=True)
            if result.verdict != "killed":
                failed.append(line)
                print(result.output)
    if failed:  # once more, where the end of a long log has them
        print("\nnot killed:", *failed, sep="\n")
    verdicts = ", ".join(f"{number} {what}" for what, number in counts.items())
    print(f"{len(chosen)} mutants in {time.monotonic() - begin_s:.0f} s: {verdicts}")
    return int(counts["killed"] < max(len(chosen), 1))


if __name__ == "__main__":
    sys.exit(main())
