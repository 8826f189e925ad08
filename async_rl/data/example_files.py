"""Reads the examples of a dataset one by one, from a file, a folder or the Hugging Face Hub.

```
 .jsonl  .json  .csv  .parquet    files, read here
 a folder, hub:OWNER/NAME         the package `datasets`, an extra
```

What an example means is decided in `schemas`.
"""

from __future__ import annotations

import codecs
import csv
from collections.abc import Callable, Hashable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from async_rl.data.hub_datasets import DATASET_OPTIONS, open_dataset
from async_rl.errors import ConfigError
from async_rl.observability.long_work import show_progress
from async_rl.runtime.hub_paths import parse_hub_path, suggest_hub
from async_rl.runtime.untrusted_json import UNREADABLE

if TYPE_CHECKING:
    import pyarrow as pa

Examples = Iterator[tuple[str, Any]]
"""Pairs of a place, such as file and line, and the example, or the `ConfigError` of an unreadable one."""

_BATCH_ROWS: Final = 1024
"""Rows of Arrow tables that are in memory as Python objects together."""

_MAX_CELL: Final = 1 << 30
"""Characters of a CSV cell; Python's default of 131,072 is less than some prompts have."""


def read_examples(path: str, place: str) -> Examples:
    """Read the examples of a dataset one by one, in an order that only its content determines.

    Args:
        path: A file, a folder, or a name on the Hub; `DataConfig.path` describes them.
        place: The setting that holds it.

    Raises:
        ConfigError: It does not exist or cannot be read.
        EnvironmentNotReady: It needs a package that is missing, or the Hub and that does not answer.
    """
    return show_progress(_examples_of(path, place), f"reading {path}", "examples")


def dataset_name(path: str) -> str:
    """Return the name of a dataset that the config does not name: the stem of its file, or its folder."""
    named = parse_hub_path(path, "path", DATASET_OPTIONS).name
    return Path(named).name if named != path or Path(named).is_dir() else Path(named).stem


def dataset_state(path: str) -> Hashable:
    """Return what changes when the files of a dataset on this machine do: their times and sizes."""
    found = Path(parse_hub_path(path, "path", DATASET_OPTIONS).name).resolve()
    files = sorted(each for each in found.rglob("*") if each.is_file()) if found.is_dir() else [found]
    states = [file.stat() for file in files if file.is_file()]
    return (str(found), *((state.st_mtime_ns, state.st_size) for state in states))


def _examples_of(path: str, place: str) -> Examples:
    source = parse_hub_path(path, place, DATASET_OPTIONS)
    if source.on_hub or Path(source.name).is_dir():
        return _table_examples(path, open_dataset(source, path, place).iter(batch_size=_BATCH_ROWS))
    file = Path(path)
    if not file.is_file():
        raise ConfigError(
            f"{place}: there is no file {path!r} (looked from {Path.cwd()}){suggest_hub(source.name)}"
        )
    reader = _READERS.get(file.suffix)
    if reader is None:
        raise ConfigError(
            f"{place}: {path!r} ends in {file.suffix!r}; expected {', '.join(_READERS)}, a folder or hub:NAME"
        )
    return reader(file, place)


def _jsonl_examples(path: Path, _: str) -> Examples:
    """Yield each line with its place; an unreadable line as its error."""
    with path.open("rb") as lines:
        start = lines.read(len(codecs.BOM_UTF8))
        _refuse_utf16(path, start)
        if start != codecs.BOM_UTF8:  # which some editors write
            lines.seek(0)
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                example = msgspec.json.decode(line)
            except UnicodeDecodeError as error:
                example = ConfigError(f"{where}: not UTF-8: {error}")
            except UNREADABLE as error:
                example = ConfigError(f"{where}: not a JSON object: {error}")
            yield where, example


def _json_examples(path: Path, place: str) -> Examples:
    """Yield each element of a list; a file that is no list has an example per line, as many do."""
    content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    _refuse_utf16(path, content)
    if not content.lstrip().startswith(b"["):
        yield from _jsonl_examples(path, place)
        return
    try:
        examples = msgspec.json.decode(content, type=list)
    except UNREADABLE as error:
        raise ConfigError(
            f"{place}: {str(path)!r} is not a readable list of JSON objects: {error}"
        ) from error
    for number, example in enumerate(examples, start=1):
        yield f"{path} example {number}", example


def _refuse_utf16(path: Path, start: bytes) -> None:
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ConfigError(f"{path} is UTF-16 by its byte-order mark: save it as UTF-8")


def _csv_examples(path: Path, place: str) -> Examples:
    """Yield each row with its first line; all values are strings, and an empty cell is missing."""
    csv.field_size_limit(_MAX_CELL)
    with path.open(newline="", encoding="utf-8-sig") as lines:
        rows = csv.reader(lines, strict=True)
        try:
            names = next(rows, [])
            if not all(names) or len(set(names)) < len(names):
                raise ConfigError(
                    f"{place}: the first line of {str(path)!r} is {','.join(names)!r:.200}; expected the "
                    "names of the columns, all different"
                )
            line = rows.line_num + 1
            for cells in rows:
                where, line = f"{path}:{line}", rows.line_num + 1
                if not cells:
                    continue
                if len(cells) != len(names):
                    yield (
                        where,
                        ConfigError(f"{where}: {len(cells)} cells; expected {len(names)}, as in line 1"),
                    )
                    continue
                yield where, {name: cell or None for name, cell in zip(names, cells, strict=True)}
        except UnicodeDecodeError as error:
            raise ConfigError(f"{place}: {str(path)!r} is not UTF-8: {error}; save it as UTF-8") from error
        except csv.Error as error:
            raise ConfigError(
                f"{place}: {str(path)!r} is not readable CSV at line {rows.line_num}: {error}"
            ) from error


def _parquet_examples(path: Path, place: str) -> Examples:
    """Yield each row with its place, with one batch of a row group in memory at a time."""
    import pyarrow as pa  # takes half a second, and most datasets are jsonl
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            yield from _table_examples(str(path), file.iter_batches(batch_size=_BATCH_ROWS))
    except pa.ArrowException as error:
        raise ConfigError(f"{place}: {str(path)!r} is not a readable parquet file: {error}") from error


def _table_examples(path: str, batches: Iterable[pa.RecordBatch | pa.Table]) -> Examples:
    number = 0
    for batch in batches:
        readers = {field.name: _reader_of(field.type) for field in batch.schema}
        for row in batch.to_pylist():
            number += 1
            yield (
                f"{path} row {number}",
                {key: value if value is None else readers[key](value) for key, value in row.items()},
            )


def _reader_of(kind: Any) -> Callable[[Any], Any]:
    """Return what converts the values of an Arrow type: maps to objects, and objects without nulls.

    An object of Arrow has all keys of all objects of the column: `null` stands for a missing key.
    """
    import pyarrow.types as types

    if types.is_struct(kind):
        fields = {field.name: _reader_of(field.type) for field in kind}
        return lambda value: {key: fields[key](each) for key, each in value.items() if each is not None}
    if types.is_map(kind):  # which is read as pairs
        item = _reader_of(kind.item_type)
        return lambda value: {key: item(each) for key, each in value if each is not None}
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        element = _reader_of(kind.value_type)
        return lambda value: [None if each is None else element(each) for each in value]
    return lambda value: value


_READERS: Final[dict[str, Callable[[Path, str], Examples]]] = {
    ".jsonl": _jsonl_examples,
    ".json": _json_examples,
    ".csv": _csv_examples,
    ".parquet": _parquet_examples,
}
"""By the ending of a file's name."""
