import sys
from pathlib import Path

import pytest

from async_rl.errors import ConfigError
from async_rl.runtime.loading import load_object


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory whose modules are unloaded afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(tmp_path)])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return tmp_path


def test_nested_attribute_is_loaded_when_the_path_has_dots():
    assert load_object("pathlib:Path.cwd", what="function")() == Path.cwd()


def test_users_own_file_is_found_when_it_lies_in_the_current_directory(folder: Path):
    (folder / "loop_of_mine.py").write_text("class Loop:\n    answer = 42\n")
    assert load_object("loop_of_mine:Loop", what="agent loop").answer == 42


@pytest.mark.parametrize("path", ["agent_loops.rewards", "module:", ":attribute", ""])
def test_config_error_asks_for_a_dotted_path_when_it_is_malformed(path: str):
    with pytest.raises(ConfigError, match="expected `module:attribute`"):
        load_object(path, what="reward")


def test_config_error_names_the_module_when_there_is_none(folder: Path):
    with pytest.raises(ConfigError, match=r"agent loop 'no_such_module:Loop': there is no module") as error:
        load_object("no_such_module:Loop", what="agent loop")
    assert str(folder) in str(error.value)


@pytest.mark.parametrize(
    ("path", "code", "error"),
    [
        ("pathlib:Pat", "", "did you mean 'Path'"),
        ("no_such_package.module:Loop", "", "there is no module 'no_such_package'"),
        ("mine:Loop", "import not_installed_anywhere", r"importing 'mine' failed.*not_installed_anywhere"),
        ("mine:Loop", "raise RuntimeError('no luck')", "RuntimeError: no luck"),
    ],
)
def test_config_error_names_what_is_wrong(folder: Path, path: str, code: str, error: str):
    (folder / "mine.py").write_text(code)
    with pytest.raises(ConfigError, match=error):
        load_object(path, what="agent loop")
