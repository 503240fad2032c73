"""A run opens on a laptop that has neither torch nor streamlit.

`tests/test_wheel.py` proves this in an environment without them. These tests name the module that
imports them.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Everything else of the library must import without torch, streamlit, plotly and pandas. The
# figures need plotly; `results` imports them on demand.
NEED_TORCH = ("forecast", "recording", "emulation", "sharding", "probe")
NEED_PLOTLY = ("figure_style", "figures")
HEAVY = ("torch", "streamlit", "plotly", "pandas")


def run_python(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def modules_for_a_laptop() -> list[str]:
    package = ROOT / "fsdp_inspect"
    paths = [path.relative_to(ROOT).with_suffix("") for path in package.rglob("*.py")]
    return sorted(
        ".".join(path.parts)
        for path in paths
        if path.parts[1] not in NEED_TORCH
        and path.name not in ("__init__", "__main__", *NEED_PLOTLY)
    )


def test_importing_the_package_loads_nothing_heavy() -> None:
    loaded = run_python("import sys, fsdp_inspect; print(*sorted(sys.modules))").split()

    assert not {"torch", "streamlit", "pyarrow", "numpy", "pydantic", *HEAVY} & set(loaded)


def test_every_module_outside_recording_and_sharding_imports_without_torch() -> None:
    blocked = f"import sys; sys.modules.update(dict.fromkeys({HEAVY!r}))"
    modules = modules_for_a_laptop()

    imported = run_python(
        f"{blocked}\nfrom importlib import import_module\n"
        f"for name in {modules!r}: print(import_module(name).__name__)"
    )

    assert imported.split() == modules
    assert "fsdp_inspect.store.reader" in modules


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["summary", "--help"]], ids=str)
def test_command_line_starts_without_loading_torch_or_streamlit(arguments: list[str]) -> None:
    loaded = run_python(
        "import atexit, sys; from fsdp_inspect.cli import main\n"
        f"sys.argv = ['fsdp-inspect', *{arguments!r}]\n"
        "atexit.register(lambda: print('LOADED', *sorted(sys.modules)))\n"
        "main()"
    ).split("LOADED")[1]

    assert not set(HEAVY) & set(loaded.split())
