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


def test_object_is_loaded_when_its_module_is_installed():
    assert load_object("pathlib:Path", what="class") is Path


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


def test_config_error_names_the_parent_when_a_package_is_missing(folder: Path):
    with pytest.raises(ConfigError, match="there is no module 'no_such_package'"):
        load_object("no_such_package.module:Loop", what="agent loop")


def test_config_error_suggests_a_name_when_the_attribute_is_misspelt():
    with pytest.raises(ConfigError, match="did you mean 'Path'"):
        load_object("pathlib:Pat", what="class")


def test_config_error_blames_the_import_when_the_users_file_lacks_a_dependency(folder: Path):
    (folder / "needs_more.py").write_text("import not_installed_anywhere\n")
    with pytest.raises(ConfigError, match=r"importing 'needs_more' failed.*not_installed_anywhere"):
        load_object("needs_more:Loop", what="agent loop")


def test_config_error_quotes_the_exception_when_the_users_file_raises(folder: Path):
    (folder / "raises.py").write_text("raise RuntimeError('no luck')\n")
    with pytest.raises(ConfigError, match="RuntimeError: no luck"):
        load_object("raises:Loop", what="agent loop")
