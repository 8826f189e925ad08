"""The backends that a config can name: `backend: {kind: containers, image: …}`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from agent_loops.sandboxes.containers import ContainerSettings
from agent_loops.sandboxes.local import LocalSettings
from agent_loops.sandboxes.modal import ModalSettings
from agent_loops.sandboxes.remote import DaytonaSettings, E2BSettings
from async_rl.errors import ConfigError
from async_rl.runtime.loading import load_object

BackendSettings = LocalSettings | ContainerSettings | E2BSettings | DaytonaSettings | ModalSettings


def parse_backend(given: str | Mapping[str, Any]) -> Any:
    """Return the settings of a backend: its kind alone, or a mapping with `kind` and fields.

    A kind `module:Class` is a Struct of yours with fields and a method `open_backend(run)`.

    Raises:
        ConfigError: There is no such kind or field.
    """
    fields = {"kind": given} if isinstance(given, str) else dict(given)
    kind, own = str(fields.get("kind")), None
    if ":" in kind:
        own = load_object(kind, what="sandbox backend")
        del fields["kind"]
    try:
        return msgspec.convert(fields, own or BackendSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"sandboxes: backend: {error}; expected {{kind: local, containers, e2b, daytona, modal or "
            "module:Class, …}"
        ) from error
