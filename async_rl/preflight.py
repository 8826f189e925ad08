"""What can be known before anything is started: whether config, model, dataset and dotted paths fit together.

`async-rl check` prints the findings; `async-rl train` runs the same checks first, so that a mistake costs a
second and not the start of a cluster.
"""

from __future__ import annotations

import importlib.util
import os
import sys

from async_rl.config import Config
from async_rl.engines.facts import load_facts
from async_rl.errors import ConfigError
from async_rl.loading import load_object
from async_rl.orchestrator import check_model
from async_rl.report import derived_bounds
from async_rl.rollout.dataset import load_tasks


def check(config: Config) -> list[str]:
    """Check everything that needs no process, and say what was found.

    Returns:
        A sentence for each finding: model, tasks, then the bounds that follow from the config.

    Raises:
        ConfigError: With the remedy.
    """
    facts = load_facts(config.model.path)
    check_model(config, facts)
    tasks = load_tasks(config.data)
    load_object(config.rollout.reward, what="reward")
    for name in dict.fromkeys([config.rollout.agent_loop, *(t.agent_loop for t in tasks if t.agent_loop)]):
        kind = load_object(name, what="agent loop")
        arguments = config.rollout.agent_loop_args if name == config.rollout.agent_loop else {}
        try:
            kind(**arguments)
        except TypeError as error:
            raise ConfigError(
                f"rollout.agent_loop_args: {name} cannot be made with {arguments}: {error}"
            ) from error
    _require_module(config.trainer.worker)
    model = (
        f"{len(facts.moe_layers)} of {facts.num_layers} layers with {facts.num_experts} experts, "
        f"top {facts.top_k}"
        if facts.is_moe
        else f"dense, {facts.num_layers} layers"
    )
    return [
        f"model: {model}, context {facts.context_length} tokens",
        f"data: {len(tasks)} tasks",
        *(f"{name}: {bound}" for name, bound in derived_bounds(config).items()),
    ]


def _require_module(path: str) -> None:
    """Find the trainer's module without importing it: it loads torch, and runs in other processes."""
    module, colon, attribute = path.partition(":")
    if not (module and colon and attribute):
        raise ConfigError(f"trainer.worker {path!r} is not a dotted path; expected `module:Class`")
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a parent package
        found = False
    if not found:
        raise ConfigError(
            f"trainer.worker {path!r}: there is no module {module!r}; expected an installed package or "
            f"a file in {os.getcwd()}"
        )
