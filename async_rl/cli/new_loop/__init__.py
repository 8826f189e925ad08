"""`async-rl new-loop NAME`: creates a folder with an agent loop, a tool, a reward, a dataset, a config and
tests.

The files come from `template/`, with `$name` and `$cls` replaced. Template files end in `.txt`, because they
are not valid Python or YAML yet.
"""

from __future__ import annotations

import importlib.util
import keyword
import sys
from importlib import resources
from pathlib import Path
from string import Template

from async_rl.errors import ConfigError

FILES = ("README.md", "__init__.py", "config.yaml", "loop.py", "tasks.jsonl", "test_loop.py")


def new_loop(name: str, parent: Path) -> Path:
    """Write the starting point.

    Args:
        name: Name of the folder, which is a Python package: lower case, such as `my_loop`.
        parent: Its parent folder.

    Returns:
        The folder.

    Raises:
        ConfigError: The name cannot be imported or names another module, or the folder exists or cannot be
            written.
    """
    if not name.isidentifier() or keyword.iskeyword(name) or not name.isascii() or name != name.lower():
        raise ConfigError(f"{name!r} is not a valid name of a Python package; expected one such as 'my_loop'")
    folder = parent / name
    if folder.exists():
        raise ConfigError(f"{folder} exists already: choose another name, or another folder with --dir")
    if name in sys.stdlib_module_names or importlib.util.find_spec(name) is not None:
        raise ConfigError(f"a Python module {name!r} exists already, and would be imported instead")
    values = {"name": name, "cls": "".join(part.capitalize() for part in name.split("_")) + "Loop"}
    template = resources.files(__name__) / "template"
    try:
        folder.mkdir(parents=True)
        for file in FILES:
            text = Template((template / f"{file}.txt").read_text(encoding="utf-8")).substitute(values)
            (folder / file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error.strerror}") from error
    return folder
