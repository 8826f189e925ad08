"""Opens datasets of the Hugging Face Hub, and folders in its formats, by the package `datasets`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, Final

from async_rl.errors import ConfigError, EnvironmentNotReady
from async_rl.runtime.hub_paths import HubPath

DATASET_OPTIONS: Final = ("config", "split", "revision")
"""Options of a path; `load_dataset` explains them, which calls the first one `name`."""

_DEFAULT_SPLIT: Final = "train"


def open_dataset(source: HubPath, path: str, place: str) -> Any:
    """Open a dataset, and return it in its own order, as one whose `iter` yields Arrow tables.

    Args:
        source: The path in parts.
        path: The path as it is in the config.
        place: The setting that holds it.

    Raises:
        ConfigError: There is no such dataset, config or split.
        EnvironmentNotReady: `datasets` is missing, or the Hub does not answer.
    """
    if importlib.util.find_spec("datasets") is None:
        raise EnvironmentNotReady(
            f"{place} is {path!r}, which the package `datasets` reads, and that is not installed: run "
            "`pip install -e '.[datasets]'` in async_rl's checkout, or name a .jsonl, .json, .csv or "
            ".parquet file"
        )
    import datasets  # takes a second or two, and few runs use it

    try:
        folder, options = Path(source.name), source.options
        if not source.on_hub and any(
            (folder / name).is_file() for name in ("state.json", "dataset_dict.json")
        ):
            found = datasets.load_from_disk(source.name)
            if isinstance(found, datasets.DatasetDict):
                found = found[_chosen_split(list(found), options, path, place)]
            elif "split" in options:
                raise ConfigError(f"{place}: {path!r} was saved as a single split: leave split out")
        else:
            found = datasets.load_dataset(
                source.name,
                options.get("config"),
                split=options.get("split", _DEFAULT_SPLIT),
                revision=options.get("revision"),
            )
    except ConfigError:
        raise
    except ConnectionError as error:
        raise EnvironmentNotReady(
            f"{place}: {path!r} is not in the cache of this machine, and the Hugging Face Hub cannot be "
            f"reached: {_first_line(error)}"
        ) from error
    except Exception as error:  # a dozen classes, of several packages
        raise ConfigError(
            f"{place}: {path!r} cannot be read: {_first_line(error)}; config, split and revision are chosen "
            f"by {path.partition('?')[0]}?config=…&split=…&revision=…"
        ) from error
    return found.with_format("arrow")


def _chosen_split(splits: list[str], options: dict[str, str], path: str, place: str) -> str:
    """Return the split that was named, or `train`, or the only one.

    Raises:
        ConfigError: There is no such split.
    """
    chosen = options.get("split", splits[0] if len(splits) == 1 else _DEFAULT_SPLIT)
    if chosen not in splits:
        raise ConfigError(
            f"{place}: {path!r} has no split {chosen!r}; expected split={' or split='.join(splits)}"
        )
    return chosen


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
