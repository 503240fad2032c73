"""The model of a forecast is found, or refused with a message."""

from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import pytest

from fsdp_inspect.emulation.forecast.target import build_target, default_settings, find_builder
from fsdp_inspect.errors import ForecastError


def builder(batch_size: int = 1) -> int:
    return batch_size


def test_a_builder_is_found_by_its_name() -> None:
    assert find_builder("instrumented_trainer.forecasting:build").__name__ == "build"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_colon", "Invalid builder 'no_colon'. Expected module:function"),
        (":build", "Invalid builder ':build'. Expected module:function"),
        ("no.such.module:build", r"Module 'no.such.module' cannot be imported"),
        ("instrumented_trainer.forecasting:biuld", r"has no function 'biuld'.*build"),
    ],
)
def test_a_name_that_leads_nowhere_says_why(name: str, message: str) -> None:
    with pytest.raises(ForecastError, match=message):
        find_builder(name)


def test_only_functions_that_the_module_itself_defines_are_suggested(tmp_path, monkeypatch) -> None:
    (tmp_path / "zoo.py").write_text("from os.path import join\n\n\ndef build(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ForecastError) as raised:
        find_builder("zoo:nope")
    assert str(raised.value).endswith(
        "returns a ForecastTarget. The functions of the module are 'build'."
    )


def test_default_arguments_are_settings_also_inside_a_dataclass_or_a_dictionary() -> None:
    @dataclass
    class Arguments:
        batch_size: int = 4
        optimizer: type = int

    def build(args: Arguments = Arguments(), *, width: int = 8, sizes=MappingProxyType({"a": 1})):  # noqa: B008
        """Defaults of all kinds."""

    assert default_settings(build) == {"args": {"batch_size": 4}, "width": 8, "sizes": {"a": 1}}


def test_a_setting_that_the_builder_does_not_take_is_named() -> None:
    with pytest.raises(ForecastError, match=r"Unknown setting 'batch'.*batch_size"):
        build_target(builder, {"batch": 2})


def test_what_is_no_target_is_refused() -> None:
    with pytest.raises(ForecastError, match="returned a int"):
        build_target(builder, {"batch_size": 2})


@pytest.mark.parametrize("code", [0, 1, "no data"])
def test_a_module_that_exits_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: object
) -> None:
    name = f"exiting_{type(code).__name__}_{len(str(code))}_{code == 0}"
    (tmp_path / f"{name}.py").write_text(f"import sys\nsys.exit({code!r})\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ForecastError, match=r"cannot be imported: SystemExit"):
        find_builder(f"{name}:build")
