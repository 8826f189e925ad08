"""Shows which test notices when the program ignores a setting: `python -m tests.settings [KEY ...]`."""

from __future__ import annotations

import argparse
import sys
import time

from tests.settings.table import EFFECTS
from tests.settings.trials import run_trials


def main() -> int:
    """Run the command. Returns 0 when every setting has an effect."""
    parser = argparse.ArgumentParser(prog="python -m tests.settings", description=__doc__)
    parser.add_argument("keys", nargs="*", metavar="KEY", help="these settings (default: all)")
    parser.add_argument("--jobs", type=int, default=2, help="trials at a time")
    parser.add_argument("--verbose", action="store_true", help="also print how the tests fail")
    options = parser.parse_args()
    if strange := sorted(set(options.keys) - set(EFFECTS)):
        parser.error(f"not in tests/settings/table.py: {', '.join(strange)}")
    begin_s = time.monotonic()
    chosen = {key: EFFECTS[key] for key in options.keys or EFFECTS}
    effects = run_trials(chosen, options.jobs)
    for effect in effects:
        print(f"{effect.key:<40} {effect.seconds:5.1f} s  {effect.problem or 'noticed'}  {effect.test}")
        if effect.problem or options.verbose:
            print(effect.output)
    without = sum(bool(effect.problem) for effect in effects)
    took_s = time.monotonic() - begin_s
    print(
        f"{len(effects)} settings in {took_s:.0f} s: {len(effects) - without} have an effect, {without} not"
    )
    return int(without > 0)


if __name__ == "__main__":
    sys.exit(main())
