"""Downloads the models that a config names on the Hugging Face Hub, and replaces their names by folders."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from async_rl.config.root import Config
from async_rl.errors import ConfigError, EnvironmentNotReady
from async_rl.runtime.hub_paths import PREFIX, parse_hub_path

_OPTIONS: Final = ("revision",)

_WEIGHTS: Final = "*.safetensors"

_FILES: Final = ("*.json", "*.jinja", "*.model", "*.tiktoken", "vocab.txt", "merges.txt")
"""What else of a repository is read: config, tokenizer and chat template, but no other formats of weights."""


def with_folders(config: Config, *, weights: bool) -> Config:
    """Return the config with the folder of each model, and download those that it names as `hub:OWNER/NAME`.

    Args:
        config: The config.
        weights: Whether weights are downloaded, too.

    Raises:
        ConfigError: The Hub has no such model, or this user may not read it.
        EnvironmentNotReady: The Hub cannot be reached, and the cache does not have the model.
    """
    models = {
        name: replace(model, path=_folder_of(model.path, f"models.{name}.path", weights=weights))
        for name, model in config.models.items()
    }
    path = _folder_of(config.model.path, "model.path", weights=weights)
    if path == config.model.path and models == config.models:
        return config
    return replace(config, model=replace(config.model, path=path), models=models)


def _folder_of(path: str, place: str, *, weights: bool) -> str:
    if not path.startswith(PREFIX):
        return path
    source = parse_hub_path(path, place, _OPTIONS)
    import httpx
    from huggingface_hub import snapshot_download  # takes half a second, and most paths are folders
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            source.name,
            revision=source.options.get("revision"),
            allow_patterns=[*_FILES, *([_WEIGHTS] if weights else [])],
        )
    except (LocalEntryNotFoundError, ConnectionError, httpx.TransportError) as error:
        raise EnvironmentNotReady(
            f"{place}: this machine's cache has no {path!r}, and the Hugging Face Hub cannot be reached; "
            f"run `hf download {source.name}` where there is a network, or set {place} to a folder"
        ) from error
    except (HfHubHTTPError, ValueError) as error:  # no such name or revision; a gated model without a token
        why = next(line for line in [*str(error).splitlines(), type(error).__name__] if line.strip())
        raise ConfigError(f"{place}: {path!r} cannot be downloaded: {why}") from error
    return str(folder)
