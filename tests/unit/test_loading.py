import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

import pytest

from async_rl.errors import ConfigError
from async_rl.runtime.loading import _InstalledFirst, describe_shadowed, load_object


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
        ("mine:Loop", "import sys; sys.exit(0)", "importing 'mine' failed: SystemExit: 0"),
    ],
)
def test_config_error_names_what_is_wrong(folder: Path, path: str, code: str, error: str):
    (folder / "mine.py").write_text(code)
    with pytest.raises(ConfigError, match=error):
        load_object(path, what="agent loop")


def test_installed_modules_come_first_when_a_file_has_the_name_of_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = folder / "installed"
    (installed / "spread_out" / "inner").mkdir(parents=True)  # a namespace package, as `megatron` is
    (installed / "spread_out" / "inner" / "__init__.py").write_text("place = 'installed'\n")
    sys.path.append(str(installed))
    for name in ("statistics", "spread_out", "sys"):
        (folder / f"{name}.py").write_text("raise RuntimeError('imported by mistake')\n")
    monkeypatch.delitem(sys.modules, "statistics", raising=False)
    assert load_object("statistics:mean", what="reward")([1, 3]) == 2
    assert load_object("spread_out.inner:place", what="reward") == "installed"
    monkeypatch.delitem(sys.modules, "spread_out.inner")  # the parent stays, and its path is computed anew
    sys.path.append("elsewhere")
    assert load_object("spread_out.inner:place", what="reward") == "installed"
    for path in ("statistics:reward", "statistics.reward:f", "sys:reward"):
        with pytest.raises(ConfigError, match=rf"and not {folder}/\w+\.py: rename the file"):
            load_object(path, what="reward")


def test_an_editable_package_comes_first_when_a_file_has_its_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "sources").mkdir()
    (folder / "sources" / "edited.py").write_text("place = 'installed'\n")
    (folder / "edited.py").write_text("place = 'beside'\n")
    (folder / "only_here.py").write_text("place = 'beside'\n")

    class Editable:
        """What setuptools appends."""

        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
            return PathFinder.find_spec(name, [str(folder / "sources")]) if name == "edited" else None

    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if f is not _InstalledFirst])
    sys.meta_path.append(Editable)
    assert load_object("edited:place", what="reward") == "installed"
    assert load_object("only_here:place", what="reward") == "beside"
    assert f"not {folder}/edited.py: rename the file" in str(describe_shadowed("edited:place"))


def test_only_a_file_that_is_not_imported_is_shadowed(folder: Path) -> None:
    (folder / "only_mine.py").touch()
    (folder / "statistics").mkdir()
    (folder / "statistics" / "__init__.py").touch()
    assert describe_shadowed("only_mine:f") is None
    assert describe_shadowed("json:loads") is None
    assert "statistics/__init__.py: rename the file" in str(describe_shadowed("statistics.inner:f"))


def test_a_module_beside_the_config_is_found_when_the_current_folder_has_a_folder_of_its_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("async_rl.runtime.loading.IMPORT_FOLDERS", [str(folder / "config")])
    (folder / "only_data").mkdir()
    (folder / "config").mkdir()
    (folder / "config" / "only_data.py").write_text("place = 'beside'\n")
    assert load_object("only_data:place", what="reward") == "beside"
