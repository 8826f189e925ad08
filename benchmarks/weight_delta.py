"""Measures what a delta between two weight versions saves and costs, and on which links it is faster.

    python benchmarks/weight_delta.py [--quick]

One bfloat16 tensor of random weights, of which a share moves to the next value up or down, as small steps of
an optimizer have it; then steps of AdamW at a learning rate of 1e-6 on a tiny network whose weights are kept
in float32 and served in bfloat16. Written is to memory, so that no disk is measured. A delta wins on links
slower than bytes saved / (seconds to write + seconds to apply): writing whole files is not held against
them, copying them to the host (a memcpy) is not either.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from async_rl.weights.delta import DeltaWriter
from async_rl.weights.weight_folder import WeightFolder
from trainer.weights.weight_export import raw_of

SHARES = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5)
Tensors = dict[str, torch.Tensor]


def moved(weights: torch.Tensor, share: float) -> torch.Tensor:
    """Moves a share of the weights one bit pattern up or down."""
    changes = torch.rand(weights.shape) < share
    steps = torch.randint(0, 2, weights.shape, dtype=torch.int16) * 2 - 1
    return (weights.view(torch.int16) + changes * steps).view(torch.bfloat16)


def trained(size: int, steps: int) -> list[Tensors]:
    """Yields the weights of a network after each step of AdamW at 1e-6, in bfloat16."""
    network = torch.nn.Sequential(
        torch.nn.Embedding(4096, size),
        *(torch.nn.Sequential(torch.nn.Linear(size, size), torch.nn.GELU()) for _ in range(4)),
        torch.nn.Linear(size, 4096),
    )
    for parameter in network.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.02)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-6)
    versions = []
    for _ in range(steps):
        tokens = torch.randint(0, 4096, (512,))
        loss = torch.nn.functional.cross_entropy(network(tokens), tokens.roll(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        versions.append({name: p.detach().bfloat16() for name, p in network.named_parameters()})
    return versions


def measure(label: str, before: Tensors, after: Tensors, root: Path) -> None:
    """Prints one row."""
    shutil.rmtree(root, ignore_errors=True)
    (root / "whole").mkdir(parents=True)
    save_file(before, root / "whole" / "model.safetensors")
    writer, folder = DeltaWriter(), WeightFolder(root / "host")
    writer.write_delta(((n, t.element_size(), raw_of(t)) for n, t in before.items()), root / "delta", None, 1)
    folder.copy_version(str(root / "whole"), 1)
    begin = time.perf_counter()
    writer.write_delta(((n, t.element_size(), raw_of(t)) for n, t in after.items()), root / "delta", 1, 2)
    written = time.perf_counter()
    folder.apply_delta(str(root / "delta"))
    applied = time.perf_counter()
    whole = sum(tensor.nbytes for tensor in before.values())
    changed = sum(int((before[n].view(torch.int16) != after[n].view(torch.int16)).sum()) for n in before)
    size = (root / "delta").stat().st_size
    wins = (whole - size) / (applied - begin)
    print(
        f"| {label} | {200 * changed / whole:.2f} | {whole / 1e6:.0f} | {size / 1e6:.2f} "
        f"| {whole / size:.1f} | {written - begin:.2f} | {applied - written:.2f} | {8 * wins / 1e9:.2f} |"
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the weights")
    quick = parser.parse_args().quick
    torch.manual_seed(0)
    torch.set_num_threads(1)
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    print("| | changed, % | whole, MB | delta, MB | smaller by | write, s | apply, s | wins below, Gbit/s |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        weights = torch.randn(10_000_000 if quick else 100_000_000).mul_(0.02).bfloat16()
        for share in SHARES:
            measure("one value up or down", {"w": weights}, {"w": moved(weights, share)}, Path(folder) / "a")
        versions = trained(256 if quick else 1024, 12)
        for step in (2, 6, 11):
            measure(f"AdamW at 1e-6, step {step + 1}", versions[step - 1], versions[step], Path(folder) / "a")


if __name__ == "__main__":
    main()
