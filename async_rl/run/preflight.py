"""What can be known before anything is started: whether config, model, dataset and dotted paths fit together.

`async-rl check` prints the findings; `async-rl train` runs the same checks first, so that a mistake costs a
second and not the start of a cluster.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections import Counter
from itertools import chain
from typing import Any

from async_rl.config import Config, SGLangEngines
from async_rl.data.chat_format import ChatFormat, has_tokenizer, load_chat_format
from async_rl.data.dataset import Dataset, load_run_tasks, load_validation, prompt_rule
from async_rl.data.template_rewrites import describe_rewrites
from async_rl.engines.model_facts import check_model, load_facts
from async_rl.engines.sglang.server import detect_device
from async_rl.errors import ConfigError, EnvironmentNotReady
from async_rl.observability.console_report import derived_bounds
from async_rl.observability.metrics import Metrics
from async_rl.observability.trackers.choice import choose as choose_trackers
from async_rl.rollout.loops import AgentLoops
from async_rl.rollout.rewards.reward_calls import Rewards


def check(config: Config) -> list[str]:
    """Check everything that needs no process, and say what was found.

    Returns:
        A sentence for each finding: model, tasks, then the bounds that follow from the config.

    Raises:
        ConfigError: With the remedy.
    """
    if config.data.path is None and not config.data.datasets:
        raise ConfigError("data.path is missing: set it to a .jsonl or .parquet file of tasks")
    facts = load_facts(config.model.path)
    check_model(config, facts)
    rewards = Rewards(config, decode=str, metrics=Metrics(), clock=time.monotonic)
    loops = AgentLoops(config.rollout)
    require_module(config.trainer.worker, "trainer.worker")
    choose_trackers(config)
    tasks = load_run_tasks(config)  # last: of large data it takes a while
    validation = load_validation(config.data, prompt_rule(config)) if config.data.validation else []
    used = Counter(task.agent_loop or config.rollout.agent_loop for task in tasks)
    for task in chain(tasks, *(dataset.tasks for dataset in validation)):
        try:
            loops.get_loop(task.agent_loop)
            rewards.name_for(task)
        except ConfigError as error:
            raise ConfigError(f"task {task.task_id}: {error}") from error
    # Weights and tokenizer of an engine elsewhere need not be here.
    chat = load_chat_format(config.model.path) if has_tokenizer(config.model.path) else None
    of_loops = [text for name in used for text in _findings(loops.get_loop(name), chat)]
    scored = Counter(rewards.name_for(task) for task in tasks)
    model = (
        f"{len(facts.moe_layers)} of {facts.num_layers} layers with {facts.num_experts} experts, "
        f"top {facts.top_k}"
        if facts.is_moe
        else f"dense, {facts.num_layers} layers"
    )
    return [
        f"model: {model}, context {facts.context_length} tokens",
        *_of_sharing(config),
        *(_of_template(chat) if chat is not None else ()),
        f"data: {len(tasks)} tasks",
        *(f"data: {_described(dataset)}" for dataset in tasks.datasets),
        *(f"validation: {_described(dataset)}" for dataset in validation),
        *(f"agent loop: {name}, of {count} tasks" for name, count in used.items()),
        *of_loops,
        *(f"reward: {name}, of {count} tasks" for name, count in scored.items()),
        *(f"{name}: {bound}" for name, bound in derived_bounds(config).items()),
    ]


def _findings(loop: Any, chat: ChatFormat | None) -> list[str]:
    """What an agent loop says of itself, if it has a `check`: see `agent_loops.base.AgentLoop.check`."""
    return list(loop.check(chat.template)) if chat is not None and hasattr(loop, "check") else []


def _of_sharing(config: Config) -> list[str]:
    """Whether engines and trainer can take turns on the devices of this machine."""
    if not config.placement.shared:
        return []
    if isinstance(config.engine, SGLangEngines) and _device(config.engine) == "cuda":
        if importlib.util.find_spec("torch_memory_saver") is None:
            raise EnvironmentNotReady(
                "placement.shared: SGLang gives device memory back by torch-memory-saver, which is not "
                "installed here: `pip install torch-memory-saver`, or set placement.shared=false"
            )
        return ["devices: shared; engines hold nothing while the trainer works, and the other way round"]
    return ["devices: engines and trainer take turns, but this machine has no GPU memory to share"]


def _device(engine: SGLangEngines) -> str:
    return detect_device() if engine.device == "auto" else engine.device


def _of_template(chat: ChatFormat) -> list[str]:
    """Where a server that renders messages anew would read other turns than the policy wrote."""
    rewritten = describe_rewrites(chat)
    if not rewritten:
        return ["chat template: append-only, earlier turns stay as they were written"]
    return [
        *(f"chat template: {finding}" for finding in rewritten),
        "chat template: sessions keep every turn as the policy wrote it, whatever the template makes of it",
    ]


def _described(dataset: Dataset) -> str:
    schema = f"{dataset.schema} rows{' by the first one' if dataset.detected else ''}"
    weight = f", weight {dataset.weight:g}" if dataset.weight is not None else ""
    prompts = "" if dataset.longest_prompt is None else f", longest prompt {dataset.longest_prompt} tokens"
    left_out = f", {dataset.num_filtered} longer ones left out" if dataset.num_filtered else ""
    return f"{dataset.name}: {len(dataset.tasks)} {schema}{weight}{prompts}{left_out}"


def check_trainer(config: Config, worker: str, key: str) -> None:
    """Ask the package of the trainer whether it can train this model in this layout.

    Args:
        config: Of the run.
        worker: Dotted path of the worker class. Its package says what it knows by a function `check(config)`,
            which must not load torch; one without it is asked when it is started.
        key: The setting that holds the path.

    Raises:
        ConfigError: Of the path, or the package's own.
    """
    require_module(worker, key)
    package = sys.modules.get(worker.partition(":")[0].rpartition(".")[0])
    if package is not None and hasattr(package, "check"):
        package.check(config)


def require_module(path: str, key: str) -> None:
    """Find the trainer's module without importing it: it loads torch, and runs in other processes."""
    module, colon, attribute = path.partition(":")
    if not (module and colon and attribute):
        raise ConfigError(f"{key} {path!r} is not a dotted path; expected `module:Class`")
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a parent package
        found = False
    if not found:
        raise ConfigError(
            f"{key} {path!r}: there is no module {module!r}; expected an installed package or "
            f"a file in {os.getcwd()}"
        )
