"""`async-rl train` and `check`: a config is run, or only looked at."""

from __future__ import annotations

import argparse
import sys

from async_rl.cli.commands.command import Command, add_config


def _train(parsed: argparse.Namespace) -> int:
    from async_rl.cli.train import train

    return train(parsed.config, parsed.overrides)


def _check(parsed: argparse.Namespace) -> int:
    from async_rl.config import load_config
    from async_rl.config.reference import resolved_yaml
    from async_rl.run.preflight import check, check_trainer

    config = load_config(parsed.config, parsed.overrides)
    check_trainer(config, config.trainer.worker, "trainer.worker")
    findings = check(config)
    sys.stdout.write(resolved_yaml(config))
    for finding in findings:
        print(f"# {finding}")
    return 0


TRAIN = Command(
    "train",
    "run a config to its end, or continue it",
    "The run's files are in <run.dir>/<run.name>. The first Ctrl-C lets running work end and writes "
    "a checkpoint, the second aborts.",
    add_config,
    _train,
)
CHECK = Command(
    "check",
    "say whether a config can work; start nothing",
    "Checks the config, the model's folder, every row of the dataset and all dotted paths, and "
    "prints the resolved config with the bounds that follow from it.",
    add_config,
    _check,
)
