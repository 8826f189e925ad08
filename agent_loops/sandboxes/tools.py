"""A shell for the policy, with a sandbox for each trajectory: `agent_loops.sandboxes.tools:Shell`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any, Final, Self

from agent_loops.sandboxes.opener import Sandboxes
from agent_loops.sandboxes.protocol import GRACE_S, ExecResult, ShellSandbox
from async_rl.errors import ConfigError
from async_rl.types import Task

_MARGIN_S: Final = 60.0
"""Added to the time limit of a call, so that the limits of its parts end it first: the policy reads of the
limit of its command, and a sandbox that does not answer fails the attempt."""


class Shell:
    """A tool with one sandbox per trajectory, which starts with the first call."""

    name = "shell"

    def __init__(
        self,
        backend: str | Mapping[str, Any] = "local",
        *,
        command_s: float = 30.0,
        image_field: str = "",
        start_s: float = 120.0,
        **options: Any,
    ) -> None:
        """Start nothing yet.

        Args:
            backend: See `Sandboxes`.
            command_s: The time limit of a command.
            image_field: The field of an example that names its image; without one, the default is taken.
            start_s: See `Sandboxes`.
            options: Further arguments of `Sandboxes`.
        """
        if command_s <= 0:
            raise ConfigError(f"shell: command_s is {command_s}; expected more than 0")
        self._sandboxes = Sandboxes(backend, start_s=start_s, **options)
        self._command_s = command_s
        self._image_field = image_field
        self.timeout_s = start_s + command_s + 2 * GRACE_S + _MARGIN_S
        """The limit of a call, the start included."""

    async def __aenter__(self) -> Self:
        await self._sandboxes.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._sandboxes.__aexit__(*error)

    async def create(self, task: Task) -> tuple[AsyncExitStack, ShellSandbox]:
        """Open a sandbox for a trajectory."""
        stack = AsyncExitStack()
        image = str(task.metadata.get(self._image_field, "")) if self._image_field else ""
        return stack, await stack.enter_async_context(self._sandboxes.open(image=image))

    async def execute(self, state: tuple[AsyncExitStack, ShellSandbox], command: str) -> str:
        """Run a shell command and return what it prints.

        Args:
            state: The trajectory's sandbox.
            command: The command, for `sh -c`. Files are kept for the next command; variables are not.
        """
        return _as_text(await state[1].exec(command, timeout_s=self._command_s), self._command_s)

    async def release(self, state: tuple[AsyncExitStack, ShellSandbox]) -> None:
        """End the sandbox."""
        await state[0].aclose()


def _as_text(result: ExecResult, limit_s: float) -> str:
    """Return the outputs of a command, and how it ended unless it exited with 0."""
    notes = ["[more output was cut]"] if result.truncated else []
    if result.timed_out:
        notes.append(f"[ended after {limit_s:g} s]")
    elif result.exit_code:
        notes.append(f"[exit code {result.exit_code}]")
    parts = (result.stdout.rstrip("\n"), result.stderr.rstrip("\n"), *notes)
    return "\n".join(filter(None, parts)) or "(no output)"
