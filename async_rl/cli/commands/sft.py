"""`async-rl sft`: supervised training, the warm start of a run."""

from __future__ import annotations

import argparse

from async_rl.cli.commands.command import Command, add_config


def _sft(parsed: argparse.Namespace) -> int:
    from async_rl.sft.sft_run import sft

    return sft(parsed.config, parsed.overrides)


SFT = Command(
    "sft",
    "train on conversations (supervised), or continue that",
    "Reads the section `sft` of the config; layout, memory and checkpoints are those of `trainer`. Writes a "
    "Hugging Face folder, for model.path of `async-rl train`. The first Ctrl-C writes a checkpoint.",
    add_config,
    _sft,
)
