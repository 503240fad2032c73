"""The wheel works in fresh environments, with and without the extras.

An environment is a real virtual environment into which pip installs the wheel. Its dependencies are
links to the distributions of the environment that runs the tests: those in the wheel's metadata,
and their dependencies. A forgotten dependency is therefore missing, like for a user, and nothing is
downloaded.
"""

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from fsdp_inspect import __version__
from fsdp_inspect.store.folder import list_runs
from tests.conftest import Torchrun

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
SOURCES = ("pyproject.toml", "README.md", "LICENSE")
PACKAGES = ("fsdp_inspect", "app/fsdp_inspect_app", "instrumented_trainer")
JUNK = shutil.ignore_patterns("__pycache__", "*.egg-info")


@dataclass(frozen=True)
class Environment:
    """A virtual environment with the wheel installed, and an empty folder to work in."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        return next(self.folder.glob("lib/python*/site-packages"))

    def run(self, *command: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a program of this environment, like after its activation."""
        done = subprocess.run(
            [self.folder / "bin" / command[0], *command[1:]],
            cwd=self.folder,
            env=_environment_of_a_stranger(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0 or not check, done.stdout[-3000:] + done.stderr[-3000:]
        return done

    def has(self, module: str) -> bool:
        script = f"from importlib.util import find_spec; print(find_spec({module!r}) is not None)"
        return self.run("python", "-c", script).stdout == "True\n"


def _environment_of_a_stranger() -> dict[str, str]:
    ours = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONWARNINGS")
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    return {**kept, "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel in its published form, built from the source distribution."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for name in SOURCES:
        shutil.copy(ROOT / name, source / name)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=JUNK)
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", built, source],
        check=True,
        capture_output=True,
        timeout=300,
    )
    return next(built.glob("*.whl"))


@pytest.fixture(scope="module")
def core(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return _install(wheel, "", tmp_path_factory.mktemp("core"))


@pytest.fixture(scope="module")
def with_record(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return _install(wheel, "record", tmp_path_factory.mktemp("record"))


@pytest.fixture(scope="module")
def with_app(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return _install(wheel, "app", tmp_path_factory.mktemp("app"))


def _install(wheel: Path, extra: str, folder: Path) -> Environment:
    venv.create(folder, symlinks=True)
    environment = Environment(folder)
    for needed in _needed_by(_distribution_in(wheel), extra):
        _link(needed, environment.site_packages)
    wanted = f"{wheel}[{extra}]" if extra else str(wheel)
    _pip(environment, "install", "--no-index", wanted)
    _pip(environment, "check")
    return environment


def _pip(environment: Environment, *arguments: str) -> None:
    pip = [sys.executable, "-m", "pip", "--isolated", "--python", str(environment.python)]
    done = subprocess.run(
        [*pip, *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _distribution_in(wheel: Path) -> Distribution:
    return PathDistribution(zipfile.Path(wheel, f"fsdp_inspect-{__version__}.dist-info/"))


def _needed_by(wanted: Distribution, extra: str) -> list[Distribution]:
    """The direct and indirect requirements of `wanted[extra]`, as installed for the tests."""
    seen: set[tuple[str, str]] = set()
    found: dict[str, Distribution] = {}
    waiting = list(_requirements(wanted, {extra}))
    while waiting:
        requirement = waiting.pop()
        key = (canonicalize_name(requirement.name), ",".join(sorted(requirement.extras)))
        if key not in seen:
            seen.add(key)
            found[key[0]] = distribution(requirement.name)
            waiting.extend(_requirements(found[key[0]], requirement.extras))
    return list(found.values())


def _requirements(wanted: Distribution, extras: set[str]) -> Iterator[Requirement]:
    for line in wanted.requires or []:
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in {"", *extras}):
            yield requirement


def _link(installed: Distribution, site_packages: Path) -> None:
    for name in {file.parts[0] for file in installed.files or []} - {"..", "__pycache__"}:
        link = site_packages / name
        if not link.exists():
            link.symlink_to(Path(str(installed.locate_file(name))))


def test_wheel_installs_three_packages_and_neither_app_nor_tests(wheel: Path) -> None:
    names = {Path(name).parts[0] for name in zipfile.ZipFile(wheel).namelist()}

    information = f"fsdp_inspect-{__version__}.dist-info"
    assert names == {"fsdp_inspect", "fsdp_inspect_app", "instrumented_trainer", information}


def test_wheel_holds_every_file_of_the_packages(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())

    for package in PACKAGES:
        above = (ROOT / package).parent
        files = [path for path in (ROOT / package).rglob("*") if path.is_file()]
        names = {str(path.relative_to(above)) for path in files if path.suffix != ".pyc"}
        assert names - inside == set()
        assert f"{Path(package).name}/py.typed" in names
    assert any(name.endswith(".js") for name in inside)
    assert any(name.endswith(".css") for name in inside)


def test_wheel_carries_license_and_description(wheel: Path) -> None:
    metadata = _distribution_in(wheel).metadata

    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-File"] == "LICENSE"
    assert metadata.json["description"] == (ROOT / "README.md").read_text()


def test_core_installs_neither_torch_nor_streamlit_and_no_package_named_app(
    core: Environment,
) -> None:
    assert core.has("fsdp_inspect")
    absent = ("torch", "streamlit", "plotly", "pandas", "psutil", "app", "tests")
    assert [module for module in absent if core.has(module)] == []


def test_core_says_its_version(core: Environment) -> None:
    assert __version__ in core.run("fsdp-inspect", "--version").stdout
    assert __version__ in core.run("python", "-m", "fsdp_inspect", "--version").stdout


def test_core_opens_a_run(core: Environment, sample: Path) -> None:
    recorded = json.loads((sample / "run.json").read_text())

    text = core.run("fsdp-inspect", "show", sample, "summary").stdout
    data = json.loads(core.run("fsdp-inspect", "show", sample, "--json").stdout)

    assert text.startswith(recorded["name"])
    assert data["run_id"] == recorded["name"]
    assert [unit["fqn"] for unit in data["units"]] == [unit["fqn"] for unit in recorded["units"]]


def test_core_writes_a_report_and_exports(core: Environment, sample: Path) -> None:
    core.run("fsdp-inspect", "export", sample, "html", "--out", "report.html")
    core.run("fsdp-inspect", "export", sample, "perfetto", "--out", "trace.json")
    core.run("fsdp-inspect", "export", sample, "csv", "--out", "tables")

    assert "</html>" in (core.folder / "report.html").read_text()
    assert json.loads((core.folder / "trace.json").read_text())["traceEvents"]
    assert (core.folder / "tables" / "events.csv").exists()


@pytest.mark.parametrize(
    ("command", "extra"),
    [(["app"], "[app]"), (["demo", "--no-serve"], "[record]")],
    ids=["app", "demo"],
)
def test_core_names_the_extra_that_a_command_needs(
    core: Environment, command: list[str], extra: str
) -> None:
    refused = core.run("fsdp-inspect", *command, check=False)

    assert refused.returncode == 1
    assert f"pip install 'fsdp-inspect{extra}'" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.distributed
def test_record_extra_trains_and_records_without_streamlit(
    with_record: Environment, torchrun: Torchrun
) -> None:
    train = ("-m", "instrumented_trainer", "--preset", "tiny", "--steps", "4", "--runs-dir", "runs")

    torchrun(*train, python=with_record.python, cwd=with_record.folder)

    (listed,) = json.loads(with_record.run("fsdp-inspect", "runs", "runs", "--json").stdout)
    assert listed["world_size"] == 2
    assert not with_record.has("streamlit")


def test_app_extra_shows_a_run_without_torch(with_app: Environment, sample: Path) -> None:
    script = (
        "import sys; from pathlib import Path; import fsdp_inspect_app\n"
        "from streamlit.testing.v1 import AppTest\n"
        f"sys.argv = ['app', {str(sample.parents[1])!r}]\n"
        "page = Path(fsdp_inspect_app.__file__).with_name('streamlit_app.py')\n"
        "shown = AppTest.from_file(str(page), default_timeout=60).run()\n"
        "print(list(shown.exception), [box.value for box in shown.selectbox])\n"
    )

    printed = with_app.run("python", "-c", script).stdout

    assert printed.startswith("[] ")
    assert list_runs(sample.parents[1])[0].id in printed
    assert not with_app.has("torch")


@pytest.fixture(scope="module")
def sample() -> Path:
    return next(path.parent for path in sorted((ROOT / "samples").rglob("run.json")))
