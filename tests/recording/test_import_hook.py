"""A module is unchanged by the import hook, which makes one call after its import."""

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

from fsdp_inspect.recording.import_hook import call_after_import


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a package that is not imported yet."""
    folder = tmp_path / "watched_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("VALUE = 1\n")
    (folder / "inner.py").write_text("VALUE = 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("watched_package", "watched_package.inner"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    return "watched_package"


def test_the_call_comes_once_when_the_code_of_the_module_has_run(package: str) -> None:
    seen: list[int] = []
    call_after_import(
        f"{package}.inner", lambda: seen.append(sys.modules[f"{package}.inner"].VALUE)
    )

    importlib.import_module(package)
    assert seen == []
    importlib.import_module(f"{package}.inner")
    importlib.reload(sys.modules[f"{package}.inner"])

    assert seen == [2]


def test_nothing_is_imported_by_asking(package: str) -> None:
    call_after_import(package, lambda: None)

    assert package not in sys.modules


def test_the_call_comes_at_once_when_the_module_is_there(package: str) -> None:
    importlib.import_module(package)
    seen: list[str] = []

    call_after_import(package, lambda: seen.append("called"))

    assert seen == ["called"]


def test_the_import_system_is_as_before_afterwards(package: str) -> None:
    before = list(sys.meta_path)
    call_after_import(package, lambda: None)

    module = importlib.import_module(package)

    assert sys.meta_path == before
    assert module.__spec__ is not None
    assert module.__spec__.origin == module.__file__


def test_two_may_wait_for_one_module(package: str) -> None:
    seen: list[str] = []
    call_after_import(package, lambda: seen.append("first"))
    call_after_import(package, lambda: seen.append("second"))

    importlib.import_module(package)

    assert sorted(seen) == ["first", "second"]


def test_a_callback_that_is_withdrawn_is_not_called(package: str) -> None:
    before, seen = [*sys.meta_path], list[str]()
    withdraw = call_after_import(package, lambda: seen.append("called"))
    withdraw()
    withdraw()
    assert sys.meta_path == before
    importlib.import_module(package)
    assert not seen


def test_a_module_that_is_not_there_is_still_not_found(package: str) -> None:
    call_after_import(f"{package}.missing", lambda: None)

    with pytest.raises(ModuleNotFoundError, match=r"watched_package\.missing"):
        importlib.import_module(f"{package}.missing")


def test_an_error_in_the_module_is_the_scripts(package: str, tmp_path: Path) -> None:
    (tmp_path / package / "broken.py").write_text("1 / 0\n")
    seen: list[str] = []
    call_after_import(f"{package}.broken", lambda: seen.append("called"))

    with pytest.raises(ZeroDivisionError):
        importlib.import_module(f"{package}.broken")

    assert seen == []


def test_a_search_for_the_module_does_not_end_the_wait(package: str) -> None:
    """transformers and datasets search for torch before anything imports it."""
    seen: list[str] = []
    call_after_import(package, lambda: seen.append("called"))

    assert importlib.util.find_spec(package) is not None
    assert seen == []
    importlib.import_module(package)

    assert seen == ["called"]
