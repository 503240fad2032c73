"""Every page shows the same number for a quantity, and it is the number of the library.

`tests/laws/test_typical_step_laws.py` compares the commands and the analyses.
"""

from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from fsdp_inspect_app.loading import name_runs
from streamlit.testing.v1 import AppTest

import fsdp_inspect
from fsdp_inspect.formatting import format_bytes, format_ns, format_unit
from fsdp_inspect.store.folder import list_runs
from tests.app.conftest import start_app
from tests.app.test_pages import read

SAMPLES = Path(__file__).parents[2] / "samples"
RUNS = sorted(path.parent.relative_to(SAMPLES).as_posix() for path in SAMPLES.glob("*/run.json"))
SMALLEST = "tiny-2-ranks"
PAGES = ("runs", "overview", "units", "memory", "ranks", "advice", "what_if", "compare")
NS_PER_MS = 1e6


class Pages:
    """The pages about one run, each opened once."""

    def __init__(self, run: str) -> None:
        self.name = run
        self.label = name_runs(list_runs(SAMPLES))[run]
        """The name of the run as Compare shows it."""
        self.run = fsdp_inspect.open_run(SAMPLES / run)
        self._opened = {name: self._open(name, run) for name in PAGES}

    def _open(self, name: str, run: str) -> AppTest:
        other = SMALLEST if run.startswith("hsdp") else "hsdp-4-ranks"
        compared = {"baseline": run, "with": other} if name == "compare" else {"run": run}
        page = start_app(SAMPLES, name, **compared)
        assert not page.exception
        return page

    def metrics(self, page: str) -> dict[str, tuple[str, str]]:
        """Value and detail of each number card, by label."""
        return {
            each.label: (each.value.replace("\\", ""), each.delta.replace("\\", ""))
            for each in self._opened[page].metric
        }

    def text(self, page: str) -> str:
        """The text of a page as shown to a reader."""
        return read(self._opened[page])

    def frames(self, page: str, *columns: str) -> list[pd.DataFrame]:
        """The tables of a page with these columns."""
        tables = (each.value for each in self._opened[page].dataframe)
        found = [table for table in tables if set(columns) <= set(table.columns)]
        assert found, f"{page} has no table with {columns}"
        return found

    def row(self, page: str, key: str, value: object, *columns: str) -> pd.Series:
        """The only row of a table whose `key` is `value`."""
        (table, *_) = self.frames(page, key, *columns)
        (position,) = (table[key] == value).to_numpy().nonzero()[0]
        return table.iloc[position]


@pytest.fixture(
    scope="module",
    params=[pytest.param(run, marks=[] if run == SMALLEST else pytest.mark.slow) for run in RUNS],
)
def pages(request: pytest.FixtureRequest) -> Pages:
    return Pages(request.param)


def close(value_ns: float) -> object:
    """A time in ms, as tables hold it: parts of it are rounded to ns."""
    return pytest.approx(value_ns / NS_PER_MS, abs=2e-5)


def has_fix_first(advice: str) -> bool:
    """Whether Advice recommends a fix before the plan, and so shows no tiles of the plan."""
    return "Recommended fix" in advice


def test_the_step_time_is_one_number(pages: Pages) -> None:
    summary = pages.run.summary()
    step_ns = summary.step_time_ns.typical
    run = pages.row("runs", "folder", pages.name, "step time (ms)")
    assert run["step time (ms)"] == close(step_ns)
    assert pages.metrics("overview")["Step time"][0] == format_ns(step_ns)
    *parts, total = pages.frames("overview", "part", "time (ms)")[0]["time (ms)"]
    assert sum(parts) == close(step_ns) == total
    rank = pages.row("ranks", "rank", summary.median_rank, "own work (ms)")
    assert rank["step time (ms)"] == close(step_ns)
    assert rank["own work (ms)"] + rank["exposed (ms)"] == close(step_ns)
    side = pages.row("compare", "side", pages.label, "step time (ms)")
    assert side["step time (ms)"] == close(step_ns)
    assert pages.row("compare", "", "step time")[pages.label] == format_ns(step_ns)
    assert pages.frames("compare", "part", f"{pages.label} (ms)")[0][
        f"{pages.label} (ms)"
    ].sum() == close(step_ns)
    advice = pages.text("advice")
    assert f"The recorded plan takes {format_ns(step_ns)} a step (measured)" in advice
    if not has_fix_first(advice):
        assert f"; {format_ns(step_ns)} measured)" in advice


def test_exposed_communication_is_one_number(pages: Pages) -> None:
    summary = pages.run.summary()
    exposed_ns = summary.exposed_ns
    run = pages.row("runs", "folder", pages.name, "exposed (ms)")
    assert run["exposed (ms)"] == close(exposed_ns)
    card, floor = pages.metrics("overview")["Exposed communication"]
    assert (card, floor) == (format_ns(exposed_ns), f"floor {format_ns(summary.floor_ns)}")
    assert summary.floor_ns == summary.exposed.causes_ns.get("floor", 0)
    rank = pages.row("ranks", "rank", summary.median_rank, "own work (ms)")
    assert rank["exposed (ms)"] == close(exposed_ns)
    assert pages.row("compare", "", "exposed communication")[pages.label] == format_ns(exposed_ns)
    for column in ("cause", "dimension"):
        split = pages.frames("compare", column, f"{pages.label} (ms)")[0]
        assert split[f"{pages.label} (ms)"].sum() == close(exposed_ns)


def exposed_of_units(pages: Pages) -> Iterator[tuple[str, float]]:
    for unit in pages.run.summary().units:
        yield format_unit(unit.fqn), unit.exposed_ns


def test_the_exposed_time_of_a_unit_is_one_number(pages: Pages) -> None:
    owners = pages.frames("overview", "unit", "collective", "exposed (ms)")[0]
    for unit, exposed_ns in exposed_of_units(pages):
        assert pages.row("units", "unit", unit, "exposed (ms)")["exposed (ms)"] == close(exposed_ns)
        assert owners[owners["unit"] == unit]["exposed (ms)"].sum() == close(exposed_ns)
        compared = pages.row("compare", "unit", unit, f"{pages.label}: exposed (ms)")
        assert compared[f"{pages.label}: exposed (ms)"] == close(exposed_ns)


def test_the_peak_is_one_number(pages: Pages) -> None:
    memory = pages.run.summary().memory
    peak = format_bytes(memory.peak_allocated_bytes)
    mib = pytest.approx(memory.peak_allocated_bytes / 2**20)
    run = pages.row("runs", "folder", pages.name, "peak (MiB)")
    assert run["peak (MiB)"] == mib
    for page in ("overview", "memory"):
        assert pages.metrics(page)["Peak allocated"][0] == peak
    if len(memory.ranks) > 1:  # one rank has no table of ranks
        ranks = pages.row("memory", "rank", memory.peak_rank, "peak allocated (MiB)")
        assert ranks["peak allocated (MiB)"] == mib


def test_the_peak_of_the_memory_step_is_one_number(pages: Pages) -> None:
    """On CPU it is the peak. On CUDA the allocator rounds, and plain steps have a peak, too."""
    memory = pages.run.summary().memory
    step = memory.peak
    assert step is not None
    if pages.run.manifest.device_type == "cpu":
        assert step.bytes == memory.peak_allocated_bytes
    else:
        assert 0.98 * memory.peak_allocated_bytes < step.bytes <= memory.peak_allocated_bytes
    mib = pytest.approx(step.bytes / 2**20)
    assert pages.frames("memory", "unit", "at the peak (MiB)")[0]["at the peak (MiB)"].sum() == mib
    assert (
        f"Memory at the peak by unit: {format_bytes(step.bytes)} in memory step {step.step}"
        in pages.text("memory")
    )
    column = f"{pages.label} (MiB)"
    assert pages.frames("compare", "category", column)[0][column].sum() == mib


def test_a_simulated_number_is_named_so(pages: Pages) -> None:
    what_if = pages.metrics("what_if")
    simulated, advice = what_if["Predicted step"][0], pages.text("advice")
    assert f"instead of {simulated}, both simulated" in advice
    if not has_fix_first(advice):
        assert f"instead of {simulated} (simulated" in advice
    assert what_if["Predicted FSDP exposed"][1].startswith("recorded plan, simulated: ")
