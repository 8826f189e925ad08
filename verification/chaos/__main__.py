"""`python -m verification.chaos --seed 0 --minutes 30`, also `make chaos`: injects faults into a real run.

The run has a disk of its own, a small tmpfs, so that it can be filled. Only a mount namespace sees that disk,
and it vanishes with the namespace, even after a kill. Users without privileges become root of a user
namespace.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from verification.audit_run import Result
from verification.chaos.harness import ROOT, Chaos, make_config
from verification.chaos.plan import DECK, Blow, Kind, blows

LAST_START_S = 75.0
"""Time reserved for the last start and its steps."""

DISK_MIB = 384
"""Size of the run's disk: a run of half an hour takes a fraction of it."""

NAMESPACE = "ASYNC_RL_CHAOS_NAMESPACE"
"""Environment variable that marks the process inside its own mount namespace."""


def enter_namespace() -> None:
    """Execute this command again where it may mount a file system that no other process sees."""
    as_root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    command = ["unshare", "--mount", *as_root, sys.executable, "-m", "verification.chaos", *sys.argv[1:]]
    os.execvpe("unshare", command, os.environ | {NAMESPACE: "1"})


def mount_disk(mount: Path) -> None:
    """Mount a small file system in memory, readable by this user only."""
    mount.mkdir()
    options = f"size={DISK_MIB}m,mode=0700"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "async-rl-chaos", mount], check=True)


def name_of(kind: Kind) -> str:
    """Return the name of a kind for `--only`: `engine:stuck_payload`, `trainer-rank:SIGKILL`."""
    return ":".join(kind).replace(" ", "-")


def kind_of(name: str) -> Kind:
    """Return the kind of fault that has this name."""
    for kind in DECK:
        if name_of(kind) == name:
            return kind
    raise argparse.ArgumentTypeError(f"found {name!r}, expected one of {', '.join(map(name_of, DECK))}")


def main() -> int:
    """Run the command; return 0 if every check passed."""
    parser = argparse.ArgumentParser(description="The real loop on this CPU while its processes are killed.")
    parser.add_argument("--seed", type=int, default=0, help="what is done to whom, and how the run is set")
    parser.add_argument("--minutes", type=float, default=30.0, help="how long, about")
    parser.add_argument(
        "--only", type=kind_of, nargs="+", default=DECK, metavar="VICTIM:FAULT", help="these faults only"
    )
    arguments = parser.parse_args()
    if NAMESPACE not in os.environ:
        enter_namespace()
    folder = Path(tempfile.mkdtemp(prefix="async-rl-chaos-"))
    for script, words in (("make_model.py", ["model"]), ("make_data.py", ["data"])):
        subprocess.run(
            [sys.executable, ROOT / "examples/calculator" / script, *words], cwd=folder, check=True
        )
    mount_disk(folder / "volume")
    places = folder / "volume", folder / "model", folder / "data" / "tasks.jsonl"
    tree = make_config(*places, arguments.seed, num_engines=2, num_ranks=2, num_workers=2)
    print(
        f"seed {arguments.seed}: {tree['weights']} {tree['routing']}; everything is in {folder}", flush=True
    )
    deadline = time.monotonic() + 60 * arguments.minutes - LAST_START_S

    def in_time() -> Iterator[Blow]:
        for blow in blows(arguments.seed, tuple(arguments.only)):
            if time.monotonic() > deadline:
                return
            yield blow

    only = "" if arguments.only is DECK else f' ONLY="{" ".join(map(name_of, arguments.only))}"'
    repeat = f"make chaos SEED={arguments.seed} MINUTES={arguments.minutes:g}{only}"
    chaos = Chaos(folder, tree, lambda line: print(line, flush=True))
    try:
        findings = chaos.run(in_time(), arguments.seed, required=arguments.only)
    except AssertionError as error:
        findings = [Result("the run reached its audit", False, str(error))]
    print("\n".join(["", *chaos.strikes.table(), ""]))
    for finding in findings:
        print(f"{'held' if finding.holds else 'VIOLATED':8}  {finding.check:48}  {finding.detail}")
    if not all(finding.holds for finding in findings):
        # The disk of the run's folder vanishes with this process.
        shutil.copytree(folder / "volume", folder / "kept", ignore_dangling_symlinks=True)
        print(f"\nrepeat it: {repeat}\nwhat is left of it: {folder}")
        return 1
    subprocess.run(["umount", folder / "volume"], check=True)
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
