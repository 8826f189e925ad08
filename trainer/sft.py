"""Supervised warm start with the trainer's own model: one process, native routing.

    python -m trainer.sft MODEL_DIR DATA.jsonl OUT_DIR --steps 300 --batch-sequences 64 --lr 3e-3

Each line of DATA is `{"token_ids": [...], "loss_mask": [0, 1, ...]}`. The loss is the mean over the masked
tokens of a step; the rate rises over `--warmup` steps and falls on half a cosine to a tenth. OUT_DIR is a
Hugging Face folder with the tokenizer of MODEL_DIR.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from async_rl.config import LayoutConfig, OptimizerConfig
from async_rl.errors import AsyncRLError, ConfigError, NonFiniteLoss
from trainer.log_probs import vocab_parallel_log_probs
from trainer.megatron.model import MegatronModel, choose_device, start_process_groups, stop_process_groups
from trainer.megatron.packing import pack, plan_micro_batches, shift_left
from trainer.schedule import warmup_then_cosine

FINAL_RATE = 0.1
"""Share of the peak rate that is left at the end."""


def read_rows(path: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """Read token ids and masks, `[n] int32` and `[n] bool` each.

    Raises:
        ConfigError: With file and line of the first row that cannot be used.
    """
    rows = []
    try:
        text = path.read_text()
    except OSError as e:
        raise ConfigError(f"cannot read {path}: {e.strerror}. Name a .jsonl file of token ids") from e
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            ids, mask = np.asarray(row["token_ids"], np.int32), np.asarray(row["loss_mask"], bool)
        except (ValueError, KeyError, TypeError, OverflowError) as e:
            raise ConfigError(
                f"{path}:{number}: expected token_ids and loss_mask as lists of integers: {e}"
            ) from e
        if ids.ndim != 1 or ids.shape != mask.shape or len(ids) < 2:
            raise ConfigError(
                f"{path}:{number}: {ids.size} token_ids and {mask.size} loss_mask, expected equal lists "
                "of at least 2"
            )
        rows.append((ids, mask))
    if not rows:
        raise ConfigError(f"{path} holds no rows: give at least one")
    return rows


def shuffled(count: int, size: int, seed: int) -> Iterator[list[int]]:
    """Endless batches of row indices; every row once before any comes again."""
    generator = np.random.default_rng(seed)
    order: list[int] = []
    while True:
        while len(order) < size:
            order += generator.permutation(count).tolist()
        yield order[:size]
        del order[:size]


def train_step(
    model: MegatronModel, rows: Sequence[tuple[np.ndarray, np.ndarray]], budget: int, learning_rate: float
) -> float:
    """One optimizer step on the mean negative log-prob of the masked tokens; returns that mean, nats."""
    lengths = [len(ids) for ids, _ in rows]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    token_ids = np.concatenate([ids for ids, _ in rows])
    labels = shift_left(token_ids, offsets[1:] - 1)
    mask = shift_left(np.concatenate([mask for _, mask in rows]), offsets[1:] - 1)
    (plan,) = plan_micro_batches(lengths, budget, ranks=1, align=model.alignment)
    placed = [model.place(pack(micro_batch, offsets, model.alignment), token_ids) for micro_batch in plan]

    def loss(index: int, logits: torch.Tensor) -> tuple[torch.Tensor, int, float]:
        source = placed[index][1]
        rows_of_logits = np.flatnonzero((source >= 0) & mask[source])
        wanted = torch.from_numpy(labels[source[rows_of_logits]].astype(np.int64)).to(logits.device)
        picked = logits.index_select(0, torch.from_numpy(rows_of_logits).to(logits.device))
        summed = -vocab_parallel_log_probs(picked, wanted)[0].sum()
        return summed, len(rows_of_logits), summed.item()

    total = sum(model.run([inputs for inputs, _ in placed], loss)) / max(int(mask.sum()), 1)
    norm = model.step(learning_rate)
    if not (math.isfinite(total) and math.isfinite(norm)):
        raise NonFiniteLoss(f"loss {total}, gradient norm {norm}, expected finite numbers: lower --lr")
    return total


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer.sft", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("model_dir", type=Path, help="Hugging Face folder to start from")
    parser.add_argument("data", type=Path, help=".jsonl with token_ids and loss_mask")
    parser.add_argument("out_dir", type=Path, help="Hugging Face folder to write")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-sequences", type=int, default=64, help="sequences of one step")
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--warmup", type=int, default=20, help="steps of linear warm-up")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--micro-batch-tokens", type=int, default=8192, help="tokens packed together")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--report-every", type=int, default=10, help="steps between lines")
    args = parser.parse_args(argv)
    try:
        _run(args)
    except AsyncRLError as e:
        print(f"error: {e}", file=sys.stderr)
        return e.exit_code
    return 0


def _run(args: argparse.Namespace) -> None:
    rows = read_rows(args.data)
    start_process_groups(0, 1, "", LayoutConfig(), timeout_s=600.0, seed=args.seed)
    try:
        optimizer = OptimizerConfig(lr=args.lr)
        model = MegatronModel(
            str(args.model_dir), getattr(torch, args.dtype), choose_device("auto"), optimizer
        )
        batches = shuffled(len(rows), args.batch_sequences, args.seed)
        started, tokens = time.monotonic(), 0
        for step in range(args.steps):
            batch = [rows[i] for i in next(batches)]
            rate = warmup_then_cosine(step, args.lr, args.warmup, args.steps, FINAL_RATE)
            loss = train_step(model, batch, args.micro_batch_tokens, rate)
            tokens += sum(len(ids) for ids, _ in batch)
            if (step + 1) % args.report_every == 0 or step + 1 == args.steps:
                elapsed = time.monotonic() - started
                remaining = elapsed / (step + 1) * (args.steps - step - 1)
                print(
                    f"warm start: step {step + 1}/{args.steps}  loss {loss:.4f}  "
                    f"{tokens / elapsed:,.0f} tokens/s  {remaining:.0f} s left",
                    flush=True,
                )
        model.bridge.save_hf(model.chunks, args.out_dir)
    finally:
        stop_process_groups()


if __name__ == "__main__":
    sys.exit(main())
