"""`async-rl evaluate`: validation sets answered by any model, without a trainer."""

from __future__ import annotations

import argparse
from pathlib import Path

from async_rl.cli.commands.command import Command, add_config


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument(
        "--model", type=Path, metavar="FOLDER", help="Hugging Face folder; default: model.path of the config"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="keep the record and the answers, for async-rl inspect"
    )
    parser.add_argument("--json", action="store_true", help="print the record as JSON")


def _evaluate(parsed: argparse.Namespace) -> int:
    from async_rl.cli.evaluate import evaluate

    return evaluate(parsed.config, parsed.overrides, model=parsed.model, out=parsed.out, as_json=parsed.json)


EVALUATE = Command(
    "evaluate",
    "answer a config's validation sets with any model",
    "Starts one engine as the config says, or takes engine.urls or the simulated engine, has every task of "
    "data.validation answered evaluation.samples times, and shows reward and pass@k with their intervals.",
    _add_options,
    _evaluate,
)
