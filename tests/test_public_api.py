"""The public names of `import fsdp_inspect` are complete and documented."""

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fsdp_inspect

PUBLIC_NAMES = [
    "Catalog",
    "ForecastTarget",
    "Plan",
    "Recorder",
    "Run",
    "__version__",
    "apply_plan",
    "debug_handlers",
    "forecast_memory",
    "index_runs",
    "observe_plan",
    "open_catalog",
    "open_run",
]


def test_public_names_are_these_and_no_others() -> None:
    assert fsdp_inspect.__all__ == PUBLIC_NAMES
    assert dir(fsdp_inspect) == PUBLIC_NAMES


@pytest.mark.parametrize("name", [name for name in PUBLIC_NAMES if name != "__version__"])
def test_public_name_is_documented_and_keeps_its_name(name: str) -> None:
    public: Any = getattr(fsdp_inspect, name)

    assert public.__name__ == name
    assert public.__module__.startswith("fsdp_inspect.")
    assert inspect.getdoc(public)


def test_star_import_brings_the_public_names() -> None:
    names: dict[str, Any] = {}

    exec("from fsdp_inspect import *", names)

    assert sorted(set(names) - {"__builtins__"}) == PUBLIC_NAMES


@pytest.mark.slow
def test_type_checkers_see_every_public_name_as_what_it_is(tmp_path: Path) -> None:
    """The names load lazily at run time. A missing import for type checkers would make them Any."""
    used = [name for name in PUBLIC_NAMES if name != "__version__"]
    script = tmp_path / "script.py"
    script.write_text(
        "import fsdp_inspect\n" + "".join(f"reveal_type(fsdp_inspect.{name})\n" for name in used)
    )

    mypy = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", script],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    revealed = [line for line in mypy.stdout.splitlines() if "Revealed type" in line]
    assert len(revealed) == len(used), mypy.stdout + mypy.stderr
    assert not [line for line in revealed if '"Any"' in line]


def test_unknown_name_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="module 'fsdp_inspect' has no attribute 'recorder_'"):
        _ = fsdp_inspect.recorder_
