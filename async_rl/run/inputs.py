"""Model and data of a run, read from the paths in its config."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from async_rl.config import Config
from async_rl.data.chat_format import load_chat_format
from async_rl.data.dataset import Dataset, load_run_tasks, load_validation, prompt_rule
from async_rl.engine_protocol import EngineFacts
from async_rl.engines.model_facts import check_model, load_facts


class RunInputs(NamedTuple):
    """Model and data of a run, shared by all incarnations of its trainer."""

    tasks: Any
    """The training tasks."""
    chat: Any
    """The model's chat format."""
    facts: EngineFacts
    """What the model's config says about it."""
    new_id: Callable[[], str]
    """Returns fixed-width unique ids."""
    validation: Sequence[Dataset] = ()
    """The validation sets; empty without evaluation."""

    @classmethod
    def load(cls, config: Config, new_id: Callable[[], str]) -> RunInputs:
        """Read the model's folder and the datasets of a config.

        Raises:
            ConfigError: Model, data and config do not fit together.
        """
        facts = load_facts(config.model.path)
        check_model(config, facts)
        tasks = load_run_tasks(config)
        validation = load_validation(config.data, prompt_rule(config)) if config.evaluation.enabled else []
        return cls(
            tasks, load_chat_format(config.model.path, config.model.trusted_roles), facts, new_id, validation
        )
