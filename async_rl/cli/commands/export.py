"""`async-rl export`: the weights of a checkpoint, for others."""

from __future__ import annotations

import argparse
from pathlib import Path

from async_rl.cli.commands.command import Command

_EXPORTER = "trainer.checkpoints.hf_export:export"


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint",
        type=Path,
        required=True,
        metavar="PATH",
        help="a checkpoint, or a run's folder: its newest whole one",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder to be made")
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="where config and tokenizer are; default: model.path of the run",
    )
    parser.add_argument(
        "--max-shard-bytes", type=int, metavar="N", help="of one safetensors file; default: 4 GiB"
    )


def _export(parsed: argparse.Namespace) -> int:
    from async_rl.runtime.loading import load_object

    done = load_object(_EXPORTER, what="exporter")(
        parsed.checkpoint, parsed.out, model=parsed.model, max_shard_bytes=parsed.max_shard_bytes
    )
    for flaw in done.passed_over:
        print(f"passed over: {flaw}")
    print(f"{parsed.out}: the weights of step {done.step}, from {done.checkpoint}")
    return 0


EXPORT = Command(
    "export",
    "write a checkpoint's weights as a Hugging Face folder",
    "Safetensors with config and tokenizer, for transformers, SGLang or model.path. One process reads a "
    "checkpoint of any layout, also of a run that goes on; it needs memory for the weights alone.",
    _add_options,
    _export,
)
