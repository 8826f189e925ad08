"""Measures memory and time of log-probs from hidden states, forward and backward, at a real vocabulary.

    python benchmarks/logits_memory.py [--quick] [--json FILE]

bfloat16, one rank, on a GPU where there is one. `peak_bytes` counts what a forward and backward pass
allocates at most beyond its inputs: every tensor, by a dispatch mode, or torch's own counter on a GPU.
`hidden_bytes` is the size of the hidden states. `ratio_time` compares with the plain way, which takes the
softmax of all logits in float32: the median of interleaved pairs, null where it does not fit into memory.
"""

from __future__ import annotations

import statistics
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

sys.path.insert(0, str(Path(__file__).parent.parent))  # a script finds only modules of its own folder

from benchmarks.support.tables import argument_parser, report
from trainer.losses.log_probs import vocab_parallel_log_probs

PLAIN_BYTES = 24
"""More than the plain way takes per token and vocabulary entry, to judge whether it fits."""

LogProbs = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class Measured(msgspec.Struct, frozen=True):
    """One size; bytes are those of a forward and backward pass."""

    vocabulary: int
    tokens: int
    entropy: bool
    peak_bytes: int
    hidden_bytes: int
    ratio_time: float | None
    plain_peak_bytes: int | None
    seconds: float


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operations allocate within the block, and of those alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._counted = WeakIdKeyDictionary()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and id(tensor.untyped_storage()) not in given:
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._counted:
            return
        self._counted[storage] = True
        self.alive += storage.nbytes()
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._release, storage.nbytes())

    def _release(self, size: int) -> None:
        self.alive -= size


def plain_log_probs(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Take the softmax of all logits in float32, by autograd."""
    log_p = torch.log_softmax((hidden @ weight.t()).float(), -1)
    return log_p.gather(-1, labels[:, None])[:, 0], -torch.linalg.vecdot(log_p.exp(), log_p)


def passes(log_probs: LogProbs, hidden: torch.Tensor, weight: torch.Tensor, *, entropy: bool) -> float:
    """Run a forward and backward pass; return its seconds, of the processor on a CPU."""
    hidden.grad = weight.grad = None
    labels = torch.arange(len(hidden), device=hidden.device) * 7919 % len(weight)
    clock = time.perf_counter if hidden.is_cuda else time.process_time
    synchronize(hidden)
    begin = clock()
    found, entropies = log_probs(hidden, weight, labels)
    (found.mean() + (0.01 * entropies.mean() if entropy else 0)).backward()
    synchronize(hidden)
    return clock() - begin


def synchronize(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()


def counted(
    log_probs: LogProbs, hidden: torch.Tensor, weight: torch.Tensor, *, entropy: bool
) -> tuple[int, float]:
    """Return the largest number of bytes that a pass allocates at once, and its seconds."""
    hidden.grad = weight.grad = None
    if not hidden.is_cuda:
        with PeakBytes() as counter:
            seconds = passes(log_probs, hidden, weight, entropy=entropy)
        return counter.peak, seconds
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    seconds = passes(log_probs, hidden, weight, entropy=entropy)
    return torch.cuda.max_memory_allocated() - before, seconds


def free_bytes(device: str) -> int:
    """Return the memory that is free on a device, or available on the host."""
    if device != "cpu":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]
    return psutil.virtual_memory().available


def measure(vocabulary: int, tokens: int, size: int, device: str, rounds: int, *, entropy: bool) -> Measured:
    """Measure one number of tokens: the bytes, then both ways in turn if the plain one fits into memory."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, size, device=device).bfloat16().requires_grad_()
    weight = (torch.randn(vocabulary, size, device=device) * size**-0.5).bfloat16().requires_grad_()
    fits = PLAIN_BYTES * tokens * vocabulary < free_bytes(device)
    if device != "cpu":  # compiles
        passes(vocab_parallel_log_probs, hidden, weight, entropy=entropy)
    peak, seconds = counted(vocab_parallel_log_probs, hidden, weight, entropy=entropy)
    times, ratios, plain_peak = [], [], None
    if fits:
        plain_peak, _ = counted(plain_log_probs, hidden, weight, entropy=entropy)
    for _ in range(rounds if fits else 0):
        times.append(passes(vocab_parallel_log_probs, hidden, weight, entropy=entropy))
        ratios.append(times[-1] / passes(plain_log_probs, hidden, weight, entropy=entropy))
    return Measured(
        vocabulary=vocabulary,
        tokens=tokens,
        entropy=entropy,
        peak_bytes=peak,
        hidden_bytes=hidden.nbytes,
        ratio_time=statistics.median(ratios) if ratios else None,
        plain_peak_bytes=plain_peak,
        seconds=statistics.median(times or [seconds]),
    )


def main() -> None:
    options = argument_parser(__doc__, quick="few tokens and a small hidden state").parse_args()
    if torch.cuda.is_available():
        device, tokens, size, rounds = "cuda", [2048, 16384, 32768], 2048, 7
    else:
        device, tokens, size, rounds = "cpu", [2048, 8192, 32768], 256, 3
    if options.quick:
        tokens, size, rounds = [256, 512], 64, 1
    rows = [
        measure(151_936, count, size, device, rounds, entropy=entropy)
        for count in tokens
        for entropy in (False, True)
    ]
    report(rows, f"log-probs from hidden states of {size}, forward and backward, on {device}", options.json)


if __name__ == "__main__":
    main()
