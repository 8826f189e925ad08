"""Checks before anything is started: whether config, model, dataset and dotted paths fit together.

`async-rl check` prints the findings; `async-rl train` runs the same checks first (`check_start`), so that a
mistake costs a second instead of the start of a cluster. `async_rl.run.this_machine` has those that depend on
the machine.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from async_rl.config import Config, SGLangEngines
from async_rl.config.urls_file import read_urls
from async_rl.data.chat_format import ChatFormat, check_same_tokens, has_tokenizer, load_chat_format
from async_rl.data.dataset import Dataset, load_run_tasks, load_validation, prompt_rule
from async_rl.data.template_rewrites import describe_rewrites
from async_rl.engine_protocol import EngineFacts
from async_rl.engines.model_facts import check_model, check_served_by_sglang, load_facts, read_config
from async_rl.engines.model_files import check_weights, weights_bytes
from async_rl.engines.sglang.connect import check_shares_memory
from async_rl.errors import ConfigError, EnvironmentNotReady
from async_rl.evaluation.estimates import estimated_ks
from async_rl.evaluation.evaluator import evaluation_config
from async_rl.observability.console_report import derived_bounds
from async_rl.observability.discovery import check_targets
from async_rl.observability.evaluation_record import EVERYTHING
from async_rl.observability.long_work import show_progress
from async_rl.observability.metrics import Metrics
from async_rl.observability.trackers.choice import choose as choose_trackers
from async_rl.rollout.loops import AgentLoops
from async_rl.rollout.rewards.reward_calls import Rewards
from async_rl.run.curriculum_order import opening_positions
from async_rl.run.descriptor_needs import check_descriptors
from async_rl.run.folder import check_run_folder
from async_rl.run.memory_needs import describe_memory
from async_rl.run.placement_table import check_shared_gpus
from async_rl.runtime.addresses import is_loopback
from async_rl.runtime.devices import detect_device
from async_rl.runtime.loading import describe_shadowed, extend_import_path
from async_rl.types import Task

_PLAIN_SPEED: Final = 100e6
"""Bytes per second of a weight update that any file system or network in use reaches."""


def check_start(config: Config) -> list[str]:
    """Check everything that the start of `async-rl train` would refuse on any machine.

    Returns:
        The findings of `check_config`.

    Raises:
        ConfigError: It would be refused; the message names the remedy.
        EnvironmentNotReady: As for `check_config` and the trainer's package; or ranks have no GPU to share.
    """
    check_trainer(config, config.trainer.worker, "trainer.worker")
    findings = check_config(config)
    _check_one_node(config)
    _check_engine_split("engine", config)
    for name in config.models:
        _check_engine_split(f"models.{name}", config.of_model(name))
    if isinstance(config.engine, SGLangEngines) and config.engine.urls_file is not None:
        read_urls(Path(config.engine.urls_file))
    if config.trainer.device == "cuda":
        check_shared_gpus(config)
    run_dir = check_run_folder(config)
    check_targets(Path(config.metrics.targets_dir or run_dir.parent / ".prometheus"), config.run.name)
    return findings


def _check_engine_split(section: str, config: Config) -> None:
    """Check that SGLang can split a model's attention over the GPUs of an engine that it starts.

    Source: sglang/srt/models, whose attention asserts it; on a CPU, SGLang pads.

    Raises:
        ConfigError: It cannot.
    """
    engine = config.engine
    if not isinstance(engine, SGLangEngines) or engine.urls or engine.urls_file or _device(engine) != "cuda":
        return
    if any(argument.startswith("--enable-dp-attention") for argument in engine.extra_args):
        return  # each GPU has whole heads
    model, tp = read_config(config.model.path), engine.tp_size
    heads = model.get("num_attention_heads") or tp
    groups = heads if model.get("kv_lora_rank") else model.get("num_key_value_heads") or heads
    if heads % tp or (groups % tp and tp % groups):
        raise ConfigError(
            f"{section}.tp_size is {tp}, but {config.model.path} has {heads} attention heads in {groups} "
            "groups: it must divide the heads, and divide the groups or be a multiple of them"
        )


def _check_one_node(config: Config) -> None:
    """Check that processes do not ask for what a Ray that the run starts on this machine never has.

    Raises:
        ConfigError: They do.
    """
    placement, engine = config.placement, config.engine
    if placement.joins:
        return
    remedy = "set placement.ray_address to a cluster"
    for name in ("engine", "rank", "rollout_worker"):
        if asked := [
            each for each in getattr(placement, f"resources_per_{name}") if each not in ("CPU", "GPU")
        ]:
            raise ConfigError(
                f"placement.resources_per_{name} names {', '.join(asked)}, and the Ray that is started here "
                f"has no custom resources: leave it out, or {remedy}"
            )
    urls = engine.urls if isinstance(engine, SGLangEngines) else []
    elsewhere = [url for url in urls if not is_loopback(urlsplit(url).hostname or "")]
    if config.weights.transport == "tensor" and elsewhere:
        check_shares_memory("the engine", urlsplit(elsewhere[0]).hostname or "", "this machine", {})


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
    everything = chain(tasks, *(dataset.tasks for dataset in validation))
    for task in show_progress(everything, "checking loops and rewards", "tasks"):
        try:
            loops.get_loop(task.agent_loop)
            rewards.name_for(task)
        except ConfigError as error:
            raise ConfigError(f"task {task.task_id}: {error}") from error
    chat = load_chat_format(config.model.path, config.model.trusted_roles)
    _check_vocabulary(chat, config.model.path, facts.vocab_size)
    _check_best(config, validation)
    _check_roles(chat, chain(tasks, *(dataset.tasks for dataset in validation)))
    _check_models(config, chat)
    answering = {task.agent_loop for dataset in validation for task in dataset.tasks}
    called = [loops.get_loop(name) for name in used]
    called += [loop for loop in _loops_of_evaluation(config, loops, answering) if loop not in called]
    loop_findings = dict.fromkeys(text for loop in called for text in _loop_findings(loop, chat))
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
        *_template_findings(chat),
        f"data: {len(tasks)} tasks",
        *(f"data: {_describe_dataset(dataset)}" for dataset in tasks.datasets),
        *_curriculum_findings(config, tasks),
        *(f"validation: {_describe_dataset(dataset)}" for dataset in validation),
        *(f"agent loop: {name}, of {count} tasks" for name, count in used.items()),
        *loop_findings,
        *(f"reward: {name}, of {count} tasks" for name, count in scored.items()),
        *(f"{name}: {bound}" for name, bound in derived_bounds(config).items()),
        f"rollout workers: {config.workers.number}; {config.workers.reason}",
        descriptors,
        describe_memory(config, facts),
        *(f"WARNING: the config names {path}, but {found}" for path, found in _shadowed(config)),
    ]


def _shadowed(config: Config) -> Iterator[tuple[str, str]]:
    """Yield dotted paths of the config whose module is not the user's file of that name, and which it is."""
    values: list[Any] = [msgspec.to_builtins(config)]
    while values:
        value = values.pop()
        if isinstance(value, dict):
            values += [*value.keys(), *value.values()]
        elif isinstance(value, list):
            values += value
        elif (
            isinstance(value, str)
            and re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", value)
            and (found := describe_shadowed(value)) is not None
        ):
            yield value, found


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


def _check_best(config: Config, validation: Sequence[Dataset]) -> None:
    """Check that evaluations have the figure that `trainer.keep_best` names.

    Raises:
        ConfigError: There are none, or they have no such set, or do not estimate it.
    """
    if (metric := config.trainer.keep_best) is None:
        return
    if not config.evaluation.every:
        raise ConfigError(f"trainer.keep_best is {metric}, but nothing is evaluated: set evaluation.every")
    name, _, figure = metric.rpartition("/")
    sources = {
        f"{each.name}/{task.data_source}" for each in validation for task in each.tasks if task.data_source
    }
    sets = [EVERYTHING, *(each.name for each in validation), *sorted(sources)]
    if name not in sets:
        raise ConfigError(
            f"trainer.keep_best is {metric}, and there is no set {name!r}; expected one of {', '.join(sets)}"
        )
    figures = ["reward", *(f"pass@{k}" for k in estimated_ks(config.evaluation.samples))]
    if figure not in figures:
        raise ConfigError(
            f"trainer.keep_best is {metric}; with evaluation.samples = {config.evaluation.samples}, "
            f"evaluations have {', '.join(figures)}"
        )


def _check_roles(chat: ChatFormat, tasks: Iterable[Task]) -> None:
    """Check that the chat template shows all messages of the tasks.

    Raises:
        ConfigError: It leaves out those of a role.
    """
    for task in tasks:
        for message in task.messages:
            try:
                chat.check_role(message["role"])
            except ConfigError as error:
                raise ConfigError(f"task {task.task_id}: {error}") from error


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


def _check_models(config: Config, chat: ChatFormat) -> None:
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
        cache = config.models[name].max_total_tokens
        if min(longest, cache or longest) < config.rollout.max_context_tokens:
            found = (
                f"max_total_tokens = {cache}"
                if cache and cache < longest
                else f"a context of {longest} tokens"
            )
            raise ConfigError(
                f"rollout.max_context_tokens is {config.rollout.max_context_tokens}, and the teacher "
                f"{name!r} has {found}: lower the one, or use another teacher"
            )
        if has_tokenizer(its.model.path):
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
            "data.path to a dataset of tasks"
        )
    raise ConfigError("data.path and data.datasets are both missing: set data.path to a dataset of tasks")


def _loops_of_evaluation(config: Config, loops: AgentLoops, answering: Set[str | None]) -> list[Any]:
    """Return the agent loops of evaluations, `answering` by their names.

    Raises:
        ConfigError: One cannot be loaded or made.
    """
    if answering and config.evaluation.agent_loop is not None:
        try:
            loops = AgentLoops(evaluation_config(config).rollout)
        except ConfigError as error:
            why = str(error).removeprefix("rollout.agent_loop_args: ")
            raise ConfigError(f"evaluation.agent_loop: {why}") from error
    return [loops.get_loop(name) for name in answering]


def _loop_findings(loop: Any, chat: ChatFormat) -> list[str]:
    """Return the findings of an agent loop's `check`, if it has one (`agent_loops.base.AgentLoop`).

    Raises:
        ConfigError: The loop gives the policy tools, which the chat template does not show.
    """
    if getattr(loop, "has_tools", False):
        chat.check_tools()
    return list(loop.check(chat.template)) if hasattr(loop, "check") else []


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


def _curriculum_findings(config: Config, tasks: Sequence[Task]) -> list[str]:
    if (settings := config.data.curriculum) is None:
        return []
    opens_at = opening_positions(settings, tasks)
    pools = ", ".join(f"{pool.name} up to {pool.up_to:g}" for pool in settings.pools)
    gated = "" if opens_at is None else f"; the gate lets in {sum(n <= 0 for n in opens_at)} tasks at once"
    return [f"curriculum: {pools}; weights per task{gated}"]


def _describe_dataset(dataset: Dataset) -> str:
    schema = f"{dataset.schema} examples{' by the first one' if dataset.detected else ''}"
    weight = f", weight {dataset.weight:g}" if dataset.weight is not None else ""
    prompts = "" if dataset.longest_prompt is None else f", longest prompt {dataset.longest_prompt} tokens"
    left_out = f", {dataset.num_filtered} longer ones left out" if dataset.num_filtered else ""
    absent = "".join(f"; {sentence}" for sentence in dataset.absent_keys)
    return f"{dataset.name}: {len(dataset.tasks)} {schema}{weight}{prompts}{left_out}{absent}"


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
    package = _package_of(worker)
    if hasattr(package, "check"):
        package.check(config)
    check_weights(config.model.path, load_facts(config.model.path))


def describe_trainer(config: Config) -> list[str]:
    """Return what the trainer's package says about a config, if it has a function `describe(config)`."""
    package = _package_of(config.trainer.worker)
    return list(package.describe(config)) if hasattr(package, "describe") else []


def check_trainer_here(config: Config) -> None:
    """Check that ranks can start on this machine, if the run starts Ray here and the trainer's package has a
    function `check_here(config)`.

    Raises:
        ConfigError, EnvironmentNotReady: They cannot.
    """
    if config.placement.joins:
        return
    package = _package_of(config.trainer.worker)
    if hasattr(package, "check_here"):
        package.check_here(config)


def _package_of(worker: str) -> Any:
    """Return the package of a dotted path that `require_module` has found; None if it has none."""
    return sys.modules.get(worker.partition(":")[0].rpartition(".")[0])


def require_module(path: str, key: str) -> None:
    """Find the trainer's module without importing it, because it loads torch and runs in other processes."""
    module, colon, attribute = path.partition(":")
    if not (module and colon and attribute):
        raise ConfigError(f"{key} {path!r} is not a dotted path; expected `module:Class`")
    places = extend_import_path()
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # of a parent package
        spec = None
    if spec is None:
        raise ConfigError(f"{key} {path!r}: there is no module {module!r}; expected {places}")
    if spec.origin is not None and spec.origin.endswith(".py"):
        source = Path(spec.origin).read_text(encoding="utf-8", errors="replace")
        named = rf"\b{re.escape(attribute.partition('.')[0])}\b|import \*|__getattr__"
        if not re.search(named, source):
            raise ConfigError(f"{key} {path!r}: module {module!r} has no attribute {attribute!r}")
