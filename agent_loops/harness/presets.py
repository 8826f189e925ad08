"""How known programs are told where the policy is and what to do: data, checked against their packages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from async_rl.errors import ConfigError

WORDS: Final = ("task", "task_file", "model", "base_url", "root_url", "key", "home", "workspace")
"""What may stand in braces in commands, environments and files."""
_WORD: Final = re.compile(rf"\{{({'|'.join(WORDS)})\}}")


class ProgramSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A program, and how it receives the task and the policy's address.

    The words of `WORDS` stand in braces. Without `{task}` and `{task_file}` in the command, the task is on
    standard input.
    """

    command: tuple[str, ...]
    """The program and its arguments."""
    arguments: tuple[str, ...] = ()
    """More arguments, behind those of the command."""
    environment: dict[str, str] = {}
    """Variables besides those of both APIs and of the place."""
    inherit: tuple[str, ...] = ()
    """Names of our own variables that it receives too."""
    files: dict[str, str] = {}
    """Files that are written into its home folder, by name."""
    imports: tuple[str, ...] = ()
    """Modules that a long-lived process imports once, from which the program is forked for each attempt."""

    @property
    def whole_command(self) -> tuple[str, ...]:
        """The command with all arguments."""
        return (*self.command, *self.arguments)

    @property
    def reads_stdin(self) -> bool:
        """Whether the task is on standard input."""
        return not any(word in part for part in self.whole_command for word in ("{task}", "{task_file}"))


PRESETS: Final[dict[str, ProgramSettings]] = {
    # Checked with @anthropic-ai/claude-code 2.1.197, over the Messages API.
    "claude-code": ProgramSettings(
        command=("claude", "-p", "--dangerously-skip-permissions"),
        environment={
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": "{model}",
            "ANTHROPIC_DEFAULT_OPUS_MODEL": "{model}",
            "ANTHROPIC_DEFAULT_SONNET_MODEL": "{model}",
            "API_TIMEOUT_MS": "86400000",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CONFIG_DIR": "{home}/.claude",
            "DISABLE_AUTOUPDATER": "1",
            "IS_SANDBOX": "1",  # else it refuses to run without questions as root
        },
    ),
    # Checked with @openai/codex 0.171.0, over the Responses API.
    "codex": ProgramSettings(
        command=(
            "codex",
            "exec",
            "--skip-git-repo-check",
            "--dangerously-bypass-approvals-and-sandbox",
            "-",
        ),
        environment={"CODEX_HOME": "{home}/.codex"},
        files={
            ".codex/config.toml": (
                'model = "{model}"\nmodel_provider = "policy"\ncheck_for_update_on_startup = false\n'
                '[analytics]\nenabled = false\n[model_providers.policy]\nname = "policy"\n'
                'base_url = "{base_url}"\nenv_key = "OPENAI_API_KEY"\nwire_api = "responses"\n'
                "stream_idle_timeout_ms = 86400000\n"
            )
        },
    ),
    # Checked with mini-swe-agent 2.4.6, over chat completions.
    "mini-swe-agent": ProgramSettings(
        command=(
            "mini",
            "--yolo",
            "--exit-immediately",
            "--model",
            "openai/{model}",
            "--task",
            "{task}",
            "--output",
            "{home}/trajectory.json",
        ),
        environment={
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it is fetched from the internet
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_GLOBAL_CONFIG_DIR": "{home}/.config/mini-swe-agent",
            "MSWEA_SILENT_STARTUP": "1",
        },
    ),
    # Checked with aider-chat 0.86.2, over chat completions.
    "aider": ProgramSettings(
        command=(
            "aider",
            "--model",
            "openai/{model}",
            "--weak-model",
            "openai/{model}",
            "--message-file",
            "{task_file}",
            "--yes-always",
            "--no-git",
            "--no-check-update",
            "--no-show-model-warnings",
            "--no-show-release-notes",
            "--no-detect-urls",
            "--analytics-disable",
            "--no-pretty",
            "--chat-history-file",
            "{home}/chat.md",
            "--input-history-file",
            "{home}/input",
        ),
        environment={"OPENAI_API_BASE": "{base_url}", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    ),
}


def parse_program(given: str | Mapping[str, Any]) -> ProgramSettings:
    """Return the settings of a program: a preset by name, or fields, with `preset` as their base.

    Raises:
        ConfigError: There is no such preset or field.
    """
    fields: dict[str, Any] = {"preset": given} if isinstance(given, str) else dict(given)
    name = fields.pop("preset", None)
    if name is not None and name not in PRESETS:
        raise ConfigError(
            f"rollout.agent_loop_args: program: preset is {name!r}; expected one of {', '.join(PRESETS)}"
        )
    base: dict[str, Any] = {} if name is None else msgspec.to_builtins(PRESETS[name])
    for field in ("environment", "files"):
        if isinstance(fields.get(field), Mapping):
            fields[field] = {**base.get(field, {}), **fields[field]}
    try:
        settings = msgspec.convert({**base, **fields}, ProgramSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"rollout.agent_loop_args: program: {error}") from error
    if not settings.command:
        raise ConfigError("rollout.agent_loop_args: program: command is empty; expected the program first")
    return settings


def filled(text: str, values: Mapping[str, str]) -> str:
    """Return a text with values for the words in braces; others stay."""
    return _WORD.sub(lambda found: values.get(found[1], found[0]), text)


def has_words(text: str) -> bool:
    """Return whether a text has a word in braces that is filled in."""
    return _WORD.search(text) is not None
