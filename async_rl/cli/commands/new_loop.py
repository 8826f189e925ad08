"""`async-rl new-loop`: a starting point for an agent loop of one's own."""

from __future__ import annotations

import argparse
from pathlib import Path

from async_rl.cli.commands.command import Command


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="of the folder and Python package, such as my_loop")
    parser.add_argument("--dir", type=Path, default=Path(), metavar="D", help="where it goes; default: here")


def _new_loop(parsed: argparse.Namespace) -> int:
    from async_rl.cli.new_loop import new_loop

    folder = new_loop(parsed.name, parsed.dir)
    where = "" if parsed.dir == Path() else f"cd {parsed.dir}\n"
    print(
        f"wrote {folder}; next:\n\n{where}"
        f"pytest {parsed.name}\n"
        f"async-rl rollout {parsed.name}/config.yaml --n 3 model.path=FOLDER_OF_A_MODEL"
    )
    return 0


NEW_LOOP = Command(
    "new-loop",
    "write a starting point for an agent loop",
    "Makes a folder with a loop, a tool, a reward, a dataset, a config and tests that pass as they are.",
    _add_options,
    _new_loop,
)
