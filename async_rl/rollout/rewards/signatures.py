"""The signatures of users' reward functions, and the meaning of their results. Pure.

```
 plain         reward(task, completion, **args)                                    -> number | parts
 group         reward(task, completions, **args)                                   -> number | parts, for each
 verl          compute_score(data_source=, solution_str=, ground_truth=, extra_info=, **args)
 slime         rm(args, sample)              args: the config, overridden by the reward's `args`
 slime_group   rm(args, samples)
```

A result is a number, or a mapping of numbers. `reward`, or else `score`, is trained on.

Source: verl `custom_reward_function.path` and its naive reward manager; slime `--custom-rm-path` and
`slime/utils/types.py`, `slime/rollout/rm_hub`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any, Final, Literal

import numpy as np

from async_rl.config import Config, to_builtins
from async_rl.errors import ConfigError, RewardError
from async_rl.runtime.loading import call_problem
from async_rl.runtime.reward_values import MAX_REWARD, reward_value
from async_rl.types import Completion, Task

Style = Literal["plain", "group", "verl", "slime", "slime_group"]

GROUP_STYLES: Final = frozenset({"group", "slime_group"})
"""Styles whose function is called once for all trajectories of a group."""

_STRICT_STYLES: Final = frozenset({"plain", "group"})
"""Styles whose parts must all be numbers; other styles skip other values, because users often add text."""


@dataclass
class Sample:
    """A trajectory as slime's reward functions receive it."""

    class Status(Enum):
        """How the trajectory ended."""

        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    prompt: str | list[dict[str, Any]] = ""
    """Chat messages."""
    tokens: list[int] = field(default_factory=list)
    """Prompt and response."""
    response: str = ""
    response_length: int = 0
    """Tokens after the prompt, with those of tools."""
    label: Any = None
    reward: Any = None
    loss_mask: list[int] | None = None
    """1 for each token of the response that the policy wrote, else 0."""
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    index: int | None = None
    group_index: int | None = None


def style_of(function: Callable[..., Any]) -> Style:
    """Return the style of a function, according to the names of its parameters."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # some builtins have none
        return "plain"
    if {"solution_str", "ground_truth"} <= set(names):
        return "verl"
    match names[:2]:
        case ["args", "sample"]:
            return "slime"
        case ["args", "samples"]:
            return "slime_group"
        case [_, "completions"]:
            return "group"
    return "plain"


_CALLS: Final[dict[Style, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "plain": (("task", "completion"), ()),
    "group": (("task", "completions"), ()),
    "verl": ((), ("data_source", "solution_str", "ground_truth", "extra_info")),
    "slime": (("args", "sample"), ()),
    "slime_group": (("args", "samples"), ()),
}
"""Names of the positional and of the keyword arguments of a call, by style; see `arguments`."""


def refuse_signature(function: Callable[..., Any], style: Style, name: str, args: Mapping[str, Any]) -> None:
    """Refuse a function that cannot be called in its style.

    Args:
        function: The user's function.
        style: How it will be called.
        name: The name of the reward, for the message.
        args: The config's arguments for it.

    Raises:
        ConfigError: With the arguments that it must accept.
    """
    positional, keywords = _CALLS[style]
    more = {} if style.startswith("slime") else dict(args)
    problem = call_problem(function, *positional, **(dict.fromkeys(keywords) | more))
    if problem is not None:
        expected = ", ".join([*positional, *(f"{keyword}=" for keyword in (*keywords, *more))])
        raise ConfigError(
            f"reward {name}: its function does not accept a call with ({expected}): {problem}; see "
            "docs/guide/own-task.md#rewards"
        )


def namespace_of(config: Config, args: Mapping[str, Any]) -> SimpleNamespace:
    """Return the config as nested attributes, overridden by a reward's own arguments."""

    def nested(value: Any) -> Any:
        return (
            SimpleNamespace(**{k: nested(v) for k, v in value.items()}) if isinstance(value, dict) else value
        )

    plain = to_builtins(config) | dict(args)
    return SimpleNamespace(**{key: nested(value) for key, value in plain.items()})


def response_of(completion: Completion, decode: Callable[[Any], str]) -> str:
    """Return everything after the prompt as text: turns and tool results, without special tokens."""
    start = _prompt_tokens(completion)
    return decode(completion.token_ids[start:]) if start < len(completion.token_ids) else completion.text


def sample_of(task: Task, completion: Completion, response: str) -> Sample:
    """Return a trajectory as slime's functions receive it."""
    start = _prompt_tokens(completion)
    length = completion.stop_reason in ("length", "max_turns")
    return Sample(
        prompt=task.messages,
        tokens=completion.token_ids.tolist(),
        response=response,
        response_length=len(completion.token_ids) - start,
        # slime reads labels as text, even if they are numbers.
        label=str(task.answer) if isinstance(task.answer, int | float) else task.answer,
        loss_mask=completion.response_mask[start:].astype(int).tolist(),
        status=Sample.Status.TRUNCATED if length else Sample.Status.COMPLETED,
        metadata=dict(task.metadata),
    )


def arguments(
    style: Style,
    task: Task,
    completions: Sequence[Completion],
    responses: Sequence[str],
    *,
    args: Mapping[str, Any],
    namespace: SimpleNamespace,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments of a call.

    Args:
        style: How the function is called.
        task: The task of the group.
        completions: All completions of the group for group styles, else one.
        responses: The text of each, from `response_of`.
        args: The config's arguments for this reward.
        namespace: The config and `args`, from `namespace_of`.
    """
    if style == "plain":
        return (task, completions[0]), dict(args)
    if style == "group":
        return (task, list(completions)), dict(args)
    if style == "verl":
        extra = task.metadata.get("extra_info", task.metadata)
        known = {
            "data_source": task.data_source,
            "solution_str": responses[0],
            "ground_truth": task.answer,
            "extra_info": dict(extra) if isinstance(extra, Mapping) else extra,
        }
        return (), {**known, **args}
    samples = [sample_of(task, c, r) for c, r in zip(completions, responses, strict=True)]
    return (namespace, samples if style == "slime_group" else samples[0]), {}


def parts_of(value: Any, *, part: str | None = None, strict: bool = True) -> dict[str, float]:
    """Return a result as named numbers; `reward` is trained on.

    Args:
        value: What a reward returned.
        part: The name of the part that is trained on; None takes `reward`, or else `score`.
        strict: Reject parts that are not finite numbers, instead of skipping them.

    Raises:
        RewardError: The part is missing or is not a finite number; the message begins with "returned".
    """
    if not isinstance(value, Mapping):
        return {"reward": _number("reward", value)}
    wanted = part or ("reward" if "reward" in value or "score" not in value else "score")
    if wanted not in value:
        names = sorted(str(name) for name in value)
        raise RewardError(f"returned the parts {names}, expected one called {wanted!r}")
    main = _number(wanted, value[wanted])
    rest = {str(name): part for name, part in value.items() if strict or reward_value(part) is not None}
    return {name: _number(name, part) for name, part in rest.items()} | {"reward": main}


def requires_numbers(style: Style) -> bool:
    """Return whether all parts of a style's results must be numbers."""
    return style in _STRICT_STYLES


def _prompt_tokens(completion: Completion) -> int:
    """Return the number of tokens before the policy's first token."""
    mask = completion.response_mask
    return int(np.argmax(mask)) if mask.any() else len(mask)


def _number(name: str, number: Any) -> float:
    if (value := reward_value(number)) is None:
        raise RewardError(
            f"returned {name} = {number!r:.200}, expected a finite number, at most {MAX_REWARD:g}"
        )
    return value
