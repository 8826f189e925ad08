"""Checks before anything is started: whether config, model, dataset and dotted paths fit together.

`async-rl check` prints the findings; `async-rl train` runs the same checks first, so that a mistake costs a
second instead of the start of a cluster.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections import Counter
from collections.abc import Mapping, Set
from itertools import chain
from typing import Any, Final

from async_rl.config import Config, SGLangEngines
from async_rl.data.chat_format import ChatFormat, check_same_tokens, has_tokenizer, load_chat_format
from async_rl.data.dataset import Dataset, load_run_tasks, load_validation, prompt_rule
from async_rl.data.template_rewrites import describe_rewrites
from async_rl.engine_protocol import EngineFacts
from async_rl.engines.model_facts import check_model, check_served_by_sglang, load_facts
from async_rl.engines.model_files import check_weights, weights_bytes
from async_rl.errors import ConfigError, EnvironmentNotReady
from async_rl.observability.console_report import derived_bounds
from async_rl.observability.metrics import Metrics
from async_rl.observability.trackers.choice import choose as choose_trackers
from async_rl.rollout.loops import AgentLoops
from async_rl.rollout.rewards.reward_calls import Rewards
from async_rl.run.descriptor_needs import check_descriptors
from async_rl.run.memory_needs import describe_memory
from async_rl.runtime.devices import detect_device
from async_rl.runtime.loading import extend_import_path

_PLAIN_SPEED: Final = 100e6
"""Bytes per second of a weight update that any file system or network in use reaches."""


def check_config(config: Config) -> list[str]:
    """Check everything that needs no process.

    Returns:
        Findings, one sentence each: model, tasks, then the bounds that follow from the config.

    Raises:
        ConfigError: Something does not fit together; the message names the remedy.
        EnvironmentNotReady: The limit of open files is too low for the config.
    """
    require_tasks(config)
    _check_workers(config)
    check_temperature(config)
    facts = load_facts(config.model.path)
    check_model(config, facts)
    _check_adapters(config, facts)
    rewards = Rewards(config, decode=str, metrics=Metrics(), clock=time.monotonic)
    loops = AgentLoops(config.rollout)
    require_module(config.trainer.worker, "trainer.worker")
    choose_trackers(config)
    tasks = load_run_tasks(config)  # last, because large data takes a while
    validation = load_validation(config.data, prompt_rule(config)) if config.data.validation else []
    used = Counter(task.agent_loop or config.rollout.agent_loop for task in tasks)
    for task in chain(tasks, *(dataset.tasks for dataset in validation)):
        try:
            loops.get_loop(task.agent_loop)
            rewards.name_for(task)
        except ConfigError as error:
            raise ConfigError(f"task {task.task_id}: {error}") from error
    # The weights and tokenizer of an external engine may be missing here.
    chat = (
        load_chat_format(config.model.path, config.model.trusted_roles)
        if has_tokenizer(config.model.path)
        else None
    )
    if chat is not None:
        _check_vocabulary(chat, config.model.path, facts.vocab_size)
    _check_models(config, chat)
    loop_findings = [text for name in used for text in _loop_findings(loops.get_loop(name), chat)]
    answering = {task.agent_loop for dataset in validation for task in dataset.tasks}
    _check_ports(config, {name: loops.get_loop(name) for name in used}, answering)
    descriptors = check_descriptors(config, tuple(loops.get_loop(name) for name in used))
    scored = Counter(rewards.name_for(task) for task in tasks)
    model = (
        f"{len(facts.moe_layers)} of {facts.num_layers} layers with {facts.num_experts} experts, "
        f"top {facts.top_k}"
        if facts.is_moe
        else f"dense, {facts.num_layers} layers"
    )
    return [
        f"model: {model}, context {facts.context_length} tokens",
        *_sharing_findings(config),
        *_transfer_findings(config),
        *(_template_findings(chat) if chat is not None else ()),
        f"data: {len(tasks)} tasks",
        *(f"data: {_describe_dataset(dataset)}" for dataset in tasks.datasets),
        *(f"validation: {_describe_dataset(dataset)}" for dataset in validation),
        *(f"agent loop: {name}, of {count} tasks" for name, count in used.items()),
        *loop_findings,
        *(f"reward: {name}, of {count} tasks" for name, count in scored.items()),
        *(f"{name}: {bound}" for name, bound in derived_bounds(config).items()),
        f"rollout workers: {config.workers.number}; {config.workers.reason}",
        descriptors,
        describe_memory(config, facts),
    ]


def _check_workers(config: Config) -> None:
    """Check that rollout workers can call the engines.

    Raises:
        ConfigError: The engines are simulated.
    """
    if config.num_workers and not isinstance(config.engine, SGLangEngines):
        raise ConfigError(
            f"rollout.num_workers is {config.num_workers}, and engine.kind is simulated: workers call "
            "engines over HTTP; set rollout.num_workers=auto or engine.kind=sglang"
        )


def _check_ports(config: Config, loops: Mapping[str, Any], answering: Set[str | None]) -> None:
    """Check that no two processes of a machine serve at the port of one agent loop.

    Args:
        config: The run's config.
        loops: The agent loops of rollouts, by name.
        answering: The agent loops that the validation examples name; None for those that name none.

    Raises:
        ConfigError: Several rollout workers would, or rollouts and an evaluation.
    """
    number, evaluation = config.num_workers, config.evaluation
    if evaluation.enabled and evaluation.agent_loop is None:
        answering = {name or config.rollout.agent_loop for name in answering}
    for name, loop in loops.items():
        if not (port := getattr(loop, "fixed_port", 0)):
            continue
        if number > 1 and not config.placement.joins:
            others = f"rollout.num_workers is {number}: all of them, on this machine, would serve at it"
        elif evaluation.enabled and name in answering:
            others = "evaluation.every or evaluation.at_start is set: evaluations would serve at it too"
        else:
            continue
        raise ConfigError(
            f"the agent loop {name} has port {port}, and {others}; set the loop's port to 0, which takes a "
            "free one"
        )


def _check_vocabulary(chat: ChatFormat, model_path: str, vocab_size: int) -> None:
    """Check that every token of the tokenizer has a row in the embedding."""
    tokens = len(chat.tokenizer)
    if tokens > vocab_size:
        raise ConfigError(
            f"the tokenizer in {model_path} has {tokens} tokens, and its config.json only vocab_size "
            f"{vocab_size}: one of the files belongs to another model"
        )


def check_temperature(config: Config) -> None:
    """Check that the trainer can compute log-probs at the sampling temperature; evaluations may be greedy.

    Raises:
        ConfigError: It cannot.
    """
    if config.rollout.temperature < 0.01:
        raise ConfigError(
            f"rollout.temperature is {config.rollout.temperature:g}, expected at least 0.01: engines are "
            "greedy below 1e-6, where log-probs of that temperature would be wrong, and logits divided by so "
            "little exceed float32; raise it"
        )


def _check_adapters(config: Config, facts: EngineFacts) -> None:
    """Check that engines have kernels for the adapters that they are to load.

    Raises:
        ConfigError: They have none for adapters of layers with experts.
    """
    lora = config.adapters
    if lora is None or not isinstance(config.engine, SGLangEngines) or _device(config.engine) != "cpu":
        return
    if facts.is_moe and set(lora.targets) != {"attention"}:
        raise ConfigError(
            f"trainer.lora.targets is {', '.join(lora.targets)}, and trainer.lora.sync is adapter: on a CPU, "
            "SGLang has no kernels for adapters in a model with experts but those of attention; set "
            "trainer.lora.sync=merged, or trainer.lora.targets=[attention]"
        )


def _check_models(config: Config, chat: ChatFormat | None) -> None:
    """Check that the models in `models` are there, and that the teacher can score what the policy samples.

    Raises:
        ConfigError: One is missing, or the teacher has other tokens or a shorter context.
    """
    for name in config.models:
        its = config.of_model(name)
        facts = load_facts(its.model.path)
        if isinstance(its.engine, SGLangEngines):
            check_served_by_sglang(its.model.path)
            if not its.engine.urls:
                check_weights(its.model.path, facts)
        if name != config.trainer.loss.teacher.model:
            continue
        longest = config.models[name].context_length or facts.context_length
        if longest < config.rollout.max_context_tokens:
            raise ConfigError(
                f"rollout.max_context_tokens is {config.rollout.max_context_tokens}, and the teacher "
                f"{name!r} has a context of {longest} tokens: lower the one, or use another teacher"
            )
        if chat is not None and has_tokenizer(its.model.path):
            check_same_tokens(chat.tokenizer, its.model.path)


def require_tasks(config: Config) -> None:
    """Check that the config names tasks for rollouts.

    Raises:
        ConfigError: It names none, or only conversations for `async-rl sft`.
    """
    if config.has_tasks:
        return
    if config.sft.path is not None:
        raise ConfigError(
            "the config has sft.path and no data.path, so it is one for `async-rl sft`: run that, or set "
            "data.path to a .jsonl or .parquet file of tasks"
        )
    raise ConfigError(
        "data.path and data.datasets are both missing: set data.path to a .jsonl or .parquet file of tasks"
    )


def _loop_findings(loop: Any, chat: ChatFormat | None) -> list[str]:
    """Return the findings of an agent loop's `check`, if it has one (`agent_loops.base.AgentLoop`)."""
    return list(loop.check(chat.template)) if chat is not None and hasattr(loop, "check") else []


def _sharing_findings(config: Config) -> list[str]:
    """Check whether engines and trainer can share the devices of this machine."""
    if not config.placement.shared:
        return []
    if isinstance(config.engine, SGLangEngines) and _device(config.engine) == "cuda":
        if importlib.util.find_spec("torch_memory_saver") is None:
            raise EnvironmentNotReady(
                "placement.shared: SGLang releases device memory by torch-memory-saver, which is not "
                "installed: `pip install torch-memory-saver`, or set placement.shared=false"
            )
        kept = " but the model's weights, on their hosts," if config.adapters is not None else ""
        return [f"devices: shared; engines hold no memory{kept} while the trainer works, and the reverse"]
    return ["devices: engines and trainer alternate, but this machine has no GPU memory to share"]


def _transfer_findings(config: Config) -> list[str]:
    """Say which speed of weight updates their time limit asks for, where that is no matter of course."""
    if config.adapters is not None:
        return []
    size, limit_s = weights_bytes(config.model.path), config.weights.timeout_s
    if size / limit_s < _PLAIN_SPEED:
        return []
    return [
        f"weights: {size / 1e9:.3g} GB a version; an update slower than {size / limit_s / 1e9:.2g} GB/s "
        f"exceeds weights.timeout_s = {limit_s:g}: raise it where file system or network are slower"
    ]


def _device(engine: SGLangEngines) -> str:
    return detect_device() if engine.device == "auto" else engine.device


def _template_findings(chat: ChatFormat) -> list[str]:
    """Return where rendering messages again would change turns that the policy wrote."""
    rewritten = describe_rewrites(chat)
    if not rewritten:
        return ["chat template: append-only, earlier turns are kept as they were written"]
    return [
        *(f"chat template: {finding}" for finding in rewritten),
        "chat template: sessions keep every turn as the policy wrote it, regardless of the template",
    ]


def _describe_dataset(dataset: Dataset) -> str:
    schema = f"{dataset.schema} examples{' by the first one' if dataset.detected else ''}"
    weight = f", weight {dataset.weight:g}" if dataset.weight is not None else ""
    prompts = "" if dataset.longest_prompt is None else f", longest prompt {dataset.longest_prompt} tokens"
    left_out = f", {dataset.num_filtered} longer ones left out" if dataset.num_filtered else ""
    return f"{dataset.name}: {len(dataset.tasks)} {schema}{weight}{prompts}{left_out}"


def check_trainer(config: Config, worker: str, key: str) -> None:
    """Check that the weights are there, and with the trainer's package that it can train this model.

    Args:
        config: The run's config.
        worker: Dotted path of the worker class. Its package may define a function `check(config)` that must
            not load torch; without one the check happens when the worker starts.
        key: The setting that holds the path.

    Raises:
        ConfigError: The path is wrong, the weights are incomplete, or the package refuses the config.
    """
    require_module(worker, key)
    package = sys.modules.get(worker.partition(":")[0].rpartition(".")[0])
    if package is not None and hasattr(package, "check"):
        package.check(config)
    check_weights(config.model.path, load_facts(config.model.path))


def describe_trainer(config: Config) -> list[str]:
    """Return what the trainer's package says about a config, if it has a function `describe(config)`."""
    package: Any = sys.modules.get(config.trainer.worker.partition(":")[0].rpartition(".")[0])
    return list(package.describe(config)) if hasattr(package, "describe") else []


def require_module(path: str, key: str) -> None:
    """Find the trainer's module without importing it, because it loads torch and runs in other processes."""
    module, colon, attribute = path.partition(":")
    if not (module and colon and attribute):
        raise ConfigError(f"{key} {path!r} is not a dotted path; expected `module:Class`")
    places = extend_import_path()
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a parent package
        found = False
    if not found:
        raise ConfigError(f"{key} {path!r}: there is no module {module!r}; expected {places}")
