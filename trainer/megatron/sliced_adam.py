"""Lets TransformerEngine's Adam step in slices of its parameters.

Its kernel computes in float32. Where moments have another type, `FusedAdam.step` of version 2.11.0 makes
float32 copies of the moments of a whole group before it calls the kernel: 8 bytes for each element, as much
as the moments and main weights that the smaller type was to leave. Elements do not depend on each other, so
steps of parts of the parameters, all with the count of one step, give the same bits with the copies of one
part at a time:

```
parameters   a a a b b c c c c c c c     one slice after the other: the ends of parameters do not matter
slices       └───────┘└───────┘└──┘      views of parameter, gradient and state
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from trainer.memory.estimate import STEPPED_AT_ONCE

Range = tuple[torch.Tensor, int, int]
"""A flat parameter, and the first and last + 1 of its elements."""


def step_in_slices(optimizer: Any, most: int = STEPPED_AT_ONCE) -> None:
    """Let `optimizer.step` take slices of at most `most` elements, if it copies moments.

    Parameter groups, states and their counts of steps are those of the plain optimizer before and after each
    step, and so are checkpoints. Parameters must be flat, as those of Megatron's distributed optimizer are.
    """
    names = ("exp_avg_dtype", "exp_avg_sq_dtype")
    if any(getattr(optimizer, name, torch.float32) != torch.float32 for name in names):
        optimizer.step = partial(_step, optimizer, optimizer.step, most)


def _step(optimizer: Any, step_at_once: Callable[[], None], most: int) -> None:
    groups = optimizer.param_groups
    for param in (param for group in groups for param in group["params"]):
        if not optimizer.state[param]:
            optimizer.initialize_state(param, store_param_remainders=False)
    try:
        for group in groups:
            part = group
            for ranges in slices(group["params"], most):
                views = [_view(optimizer, *each) for each in ranges]
                part = group | {"params": views}
                optimizer.param_groups = [part]
                step_at_once()
                for view in views:
                    del optimizer.state[view], optimizer._scales[view]
            if "step" in part:
                group["step"] = part["step"]
    finally:
        optimizer.param_groups = groups


def slices(params: Sequence[torch.Tensor], most: int) -> Iterator[list[Range]]:
    """Divide flat parameters into slices of `most` elements; the last one may have fewer."""
    ranges, room = list[Range](), most
    for param in params:
        start, size = 0, param.numel()
        while start < size:
            stop = min(size, start + room)
            ranges.append((param, start, stop))
            room -= stop - start
            start = stop
            if not room:
                yield ranges
                ranges, room = [], most
    if ranges:
        yield ranges


def _view(optimizer: Any, param: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return a part of a parameter, with its gradient, and give the optimizer its state."""
    view = param.detach().view(-1)[start:stop]
    gradient = "decoupled_grad" if optimizer.use_decoupled_grad else "grad"
    if (whole := getattr(param, gradient, None)) is not None:
        setattr(view, gradient, whole.view(-1)[start:stop])
    optimizer.state[view] = {
        name: tensor.view(-1)[start:stop] for name, tensor in optimizer.state[param].items()
    }
    optimizer._scales[view] = optimizer._scales[param]  # of bfloat16, which has none that count
    return view
