"""A pytest plugin that checks a test's memory: one marker, two fixtures, baselines near the tests.

    @pytest.mark.fsdp_memory("38 GiB", world_size=64)
    def test_the_model_fits(fsdp_forecast):
        fsdp_forecast(build, batch_size=2)             # rank 0 of 64, on fake tensors

    def test_a_step_takes_as_much_as_before(fsdp_record):
        with fsdp_record(model, optimizer) as recorder:
            for batch in batches:
                with recorder.step():
                    ...

A limit such as "38 GiB" needs no baseline. A limit such as "+2%", or no limit, is relative to
`fsdp_baselines/<test>.json` in the folder of the test file. `pytest --fsdp-update-baselines`
writes that file. The plugin judges memory only, never a time. A test that cannot be judged fails,
or is skipped with `--fsdp-skip-unjudged`; it never passes.

The plugin imports nothing else until a test uses it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fsdp_inspect.comparison.gate.check import CheckResult
    from fsdp_inspect.comparison.gate.limits import GateLimit
    from fsdp_inspect.comparison.gate.measurements import GateMeasurements
    from fsdp_inspect.emulation.forecast.target import Builder
    from fsdp_inspect.recording.recorder import Recorder
    from fsdp_inspect.store.reader import StoredRun

    Forecasting = Callable[..., StoredRun]
    Recording = Callable[..., AbstractContextManager[Recorder]]

MARKER = "fsdp_memory"
FOLDER = "fsdp_baselines"
UPDATE = "--fsdp-update-baselines"
SKIP_UNJUDGED = "--fsdp-skip-unjudged"

_PEAK = "peak_allocated_bytes"
_FORECASTS = "fsdp_forecast"
_RECORDS = "fsdp_record"
_KEYWORDS = ("world_size", "gpus_per_node", "device_type")
_ONLY_FORECASTS = ("gpus_per_node", "device_type")
_DEVICES = ("cuda", "cpu")
_UNSAFE = re.compile(r"[^A-Za-z0-9_.=-]+")
_MOST_CHARACTERS = 150
_PROPERTY = "fsdp_baseline"
"""The report property with the outcome of a baseline. Reports also travel from the workers of
pytest-xdist to the process that prints."""
_WIDTH = 100


# --- hooks of pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the two options."""
    group = parser.getgroup("fsdp-inspect", "memory of FSDP models")
    group.addoption(
        UPDATE,
        action="store_true",
        help="Write the memory baselines of the tests that run, instead of checking against them.",
    )
    group.addoption(
        SKIP_UNJUDGED,
        action="store_true",
        help="Skip a test whose memory cannot be judged (another torch version, another world "
        "size), instead of failing it.",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register and describe the marker."""
    config.addinivalue_line(
        "markers",
        f"{MARKER}(limit, world_size, gpus_per_node, device_type): the most memory that the test "
        "may forecast or record: '38 GiB', or '+2%' over its baseline; without a limit, exactly "
        "its baseline.",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Reject invalid and useless markers before any test runs."""
    if hasattr(config, "workerinput"):
        return  # a worker of pytest-xdist cannot report why it ends; its tests fail instead
    for item in items:
        try:
            _read_marker(item)
        except ValueError as error:
            raise pytest.UsageError(f"{item.nodeid}: {error}") from error


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Reject the invalid marker of one test, in a worker of pytest-xdist only."""
    try:
        _read_marker(item)
    except ValueError as error:
        pytest.fail(str(error), pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test that uses a fixture and measures nothing."""
    yield
    gate = item.stash.get(_GATE, None)
    if gate is not None and gate.num_judged == 0:
        pytest.fail(
            "Nothing was measured. Expected the test to call fsdp_forecast(build), or to enter "
            "`with fsdp_record(model)`. Do so, or remove the fixture.",
            pytrace=False,
        )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the written baselines."""
    lines = [
        str(value)
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", "") == "call"
        for name, value in report.user_properties
        if name == _PROPERTY
    ]
    if lines:
        terminalreporter.section("FSDP Inspect: baselines")
        for line in sorted(lines):
            terminalreporter.line(line)
        terminalreporter.line("Review the changes, and commit them.")


# --- fixtures for tests


@pytest.fixture
def fsdp_forecast(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Forecasting:
    """Forecast the memory of a training step, and fail above the limit of `fsdp_memory`.

    `fsdp_forecast(build, **settings)`: `build` is a function that returns a `ForecastTarget`, or
    its name as `module:function`; the settings are its keywords. Returns the opened run of the
    forecast.
    """
    gate = _gate_of(request)

    def forecast(build: Builder | str, **settings: Any) -> StoredRun:
        from fsdp_inspect.emulation.forecast.forecast import DEFAULT_GPUS_PER_NODE, forecast_memory
        from fsdp_inspect.emulation.forecast.target import find_builder
        from fsdp_inspect.store.reader import open_run

        path = forecast_memory(
            find_builder(build) if isinstance(build, str) else build,
            gate.next_folder(tmp_path_factory),
            world_size=gate.marked.world_size or 1,
            gpus_per_node=gate.marked.gpus_per_node or DEFAULT_GPUS_PER_NODE,
            device_type="cpu" if gate.marked.device_type == "cpu" else "cuda",
            settings=settings,
        )
        run = open_run(path)
        gate.judge(run)
        return run

    return forecast


@pytest.fixture
def fsdp_record(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Recording:
    """Record a block of real training, and fail if it takes more memory than its baseline.

    `with fsdp_record(model, optimizer, **options) as recorder:` with two steps or more inside; the
    first is the warm-up. The options are those of `Recorder`.
    """
    gate = _gate_of(request)

    @contextmanager
    def record(
        model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **options: Any
    ) -> Iterator[Recorder]:
        from fsdp_inspect.recording.recorder import Recorder

        quiet = {"warmup_steps": 1, "device_interval_s": 0.0, "print_verdict": False}
        folder = _agree(gate.next_folder(tmp_path_factory))
        with Recorder(model, optimizer=optimizer, path=folder, **{**quiet, **options}) as recorder:
            yield recorder
        gate.judge(_open_recorded(recorder))

    return record


# --- the marker


@dataclass(frozen=True, slots=True)
class _Marked:
    """The arguments of a test's marker."""

    limit: str | None = None
    world_size: int | None = None
    gpus_per_node: int | None = None
    device_type: str | None = None


def _read_marker(item: pytest.Item) -> _Marked:
    """Read the nearest marker; raises `ValueError` with the problem if it is invalid."""
    asked = set(getattr(item, "fixturenames", ()))
    marker = item.get_closest_marker(MARKER)
    if marker is None:
        if _FORECASTS in asked:
            raise ValueError(
                "fsdp_forecast requires a world size. Expected a marker that sets it. "
                f'Write @pytest.mark.{MARKER}("38 GiB", world_size=64) above the test.'
            )
        return _Marked()
    if not asked & {_FORECASTS, _RECORDS}:
        raise ValueError(
            f"the marker {MARKER} has no effect: the test uses neither fsdp_forecast nor "
            "fsdp_record. Expected one of these fixtures. Add it to the test's arguments."
        )
    return _check_arguments(marker, forecasts=_FORECASTS in asked)


def _check_arguments(marker: pytest.Mark, *, forecasts: bool) -> _Marked:
    limit = marker.args[0] if marker.args else None
    if len(marker.args) > 1:
        raise ValueError(
            f"{MARKER} takes one limit, got {len(marker.args)} arguments. Expected "
            f'{MARKER}("38 GiB", world_size=64). Pass the others by keyword.'
        )
    if limit is not None:
        _parse(limit)
    for name, value in marker.kwargs.items():
        _check_keyword(name, value, forecasts=forecasts)
    marked = _Marked(limit, **marker.kwargs)
    if forecasts and marked.world_size is None:
        raise ValueError(
            f"{MARKER} has no world_size. Expected the number of ranks to forecast. Write "
            f"{MARKER}(..., world_size=64)."
        )
    return marked


def _check_keyword(name: str, value: object, *, forecasts: bool) -> None:
    if name not in _KEYWORDS:
        raise ValueError(
            f"{MARKER} got an unknown keyword {name!r}. Expected one of {', '.join(_KEYWORDS)}. "
            "Pass settings of the model to fsdp_forecast."
        )
    if name in _ONLY_FORECASTS and not forecasts:
        raise ValueError(
            f"{name} has no effect on a recording, which runs on the real devices. Expected it "
            "with fsdp_forecast only. Remove it."
        )
    if name == "device_type":
        if value not in _DEVICES:
            raise ValueError(f"device_type is {value!r}. Expected 'cuda' or 'cpu'. Correct it.")
    elif not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} is {value!r}. Expected a number of ranks, 1 or more. Correct it.")


def _parse(limit: object) -> GateLimit:
    from fsdp_inspect.comparison.gate.limits import parse_gate_limit
    from fsdp_inspect.errors import CheckError

    if not isinstance(limit, str):
        raise ValueError(
            f"the limit is {limit!r}. Expected a text like '38 GiB' or '+2%'. Quote it."
        )
    try:
        return parse_gate_limit(_PEAK, limit)
    except CheckError as error:
        raise ValueError(str(error)) from error


# --- judging


class _Gate:
    """Checks the memory of one test against its limit and its baselines."""

    def __init__(self, item: pytest.Item) -> None:
        self.marked = _read_marker(item)
        self.num_judged = 0
        self._item = item
        self._updates = bool(item.config.getoption(UPDATE))
        self._skips = bool(item.config.getoption(SKIP_UNJUDGED))
        self._name = _safe_name(item)

    def next_folder(self, folders: pytest.TempPathFactory) -> Path:
        """The folder for the next run of this test."""
        return folders.mktemp("fsdp") / self._next_name()

    def judge(self, run: StoredRun) -> None:
        """Fail or skip the test if the run's memory does not pass; or write its baseline."""
        from fsdp_inspect.comparison.gate.check import check_run
        from fsdp_inspect.comparison.gate.measurements import read_runs

        path = self._item.path.parent / FOLDER / f"{self._next_name()}.json"
        self.num_judged += 1
        self._expect_world_size(run)
        reading = replace(read_runs([run]), times={})
        limit = None if self.marked.limit is None else _parse(self.marked.limit)
        if limit is not None and limit.absolute is not None:
            self._tell(run, check_run(reading, None, {_PEAK: limit}))
        elif self._updates:
            self._update(reading, path)
        else:
            self._tell(run, self._check_against(path, reading, limit))

    def _next_name(self) -> str:
        number = self.num_judged + 1
        return self._name if number == 1 else f"{self._name}.{number}"

    def _expect_world_size(self, run: StoredRun) -> None:
        expected, found = self.marked.world_size, run.manifest.world_size
        if expected not in (None, found):
            self._leave(
                f"The marker has world_size={expected}, but {found} ranks were recorded. Expected "
                "the same number. Remove world_size, or run the tests on as many ranks."
            )

    def _check_against(
        self, path: Path, reading: GateMeasurements, limit: GateLimit | None
    ) -> CheckResult:
        from fsdp_inspect.comparison.gate.baseline import read_baseline
        from fsdp_inspect.comparison.gate.check import ALWAYS, check_run
        from fsdp_inspect.errors import CheckError

        if not path.exists():
            pytest.fail(
                f"Baseline not found: {self._shown(path)}. Expected one from the last accepted "
                f"code. Write and commit it: pytest '{self._item.nodeid}' {UPDATE}",
                pytrace=False,
            )
        try:
            baseline = read_baseline(path)
            names = ALWAYS if limit is None else [n for n in ALWAYS if n in baseline.memory]
            limits = {} if limit is None else dict.fromkeys(names, limit)
            return check_run(reading, baseline, limits)
        except CheckError as error:
            pytest.fail(_in_words_of_pytest(str(error)), pytrace=False)

    def _tell(self, run: StoredRun, result: CheckResult) -> None:
        from fsdp_inspect.comparison.gate.check import CheckOutcome
        from fsdp_inspect.report.check import render_check

        if result.outcome is CheckOutcome.PASSES:
            return
        text = _in_words_of_pytest(_print(render_check(result)))
        if result.outcome is CheckOutcome.UNTOLD:
            self._leave(text)
        composition = "" if result.growth else f"\n\n{_describe(run)}"
        pytest.fail(f"{text}{composition}\n\nThe run is in {run.path}", pytrace=False)

    def _leave(self, reason: str) -> None:
        """Fail or skip a test that cannot be judged: it must not pass."""
        if self._skips:
            pytest.skip(reason)
        pytest.fail(reason, pytrace=False)

    def _update(self, reading: GateMeasurements, path: Path) -> None:
        from fsdp_inspect.comparison.gate.baseline import why_no_baseline, write_baseline
        from fsdp_inspect.errors import CheckError

        problem = why_no_baseline(reading)
        if problem is not None:
            pytest.fail(problem, pytrace=False)
        try:
            _, verb = write_baseline(reading, path, dry=not _is_first_rank())
        except CheckError as error:
            reason = str(error).partition(" Expected")[0]
            pytest.fail(f"{reason} Remove the file, and update again.", pytrace=False)
        self._item.user_properties.append((_PROPERTY, f"{verb} {self._shown(path)}"))

    def _shown(self, path: Path) -> str:
        root = self._item.config.rootpath
        return str(path.relative_to(root) if path.is_relative_to(root) else path)


_GATE = pytest.StashKey[_Gate]()


def _gate_of(request: pytest.FixtureRequest) -> _Gate:
    """The gate of a test; its two fixtures share one."""
    item: pytest.Item = request.node
    if _GATE not in item.stash:
        item.stash[_GATE] = _Gate(item)
    return item.stash[_GATE]


def _safe_name(item: pytest.Item) -> str:
    """The test's id as a file name; an id that loses characters ends in a part of its hash."""
    inside = item.nodeid.partition("::")[2].replace("::", ".")
    name = f"{item.path.stem}.{inside}".replace("[", "-").removesuffix("]")
    safe = _UNSAFE.sub("-", name)[:_MOST_CHARACTERS]
    return safe if safe == name else f"{safe}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _in_words_of_pytest(text: str) -> str:
    return re.sub(r"--update\b", UPDATE, text)


def _print(renderable: Any) -> str:
    """The text that a terminal would show, without colour."""
    from io import StringIO

    from rich.console import Console

    from fsdp_inspect.report.layout import Harmless

    out = StringIO()
    Console(file=out, width=_WIDTH, highlight=False, color_system=None).print(
        Harmless(renderable), crop=False
    )
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())


def _describe(run: StoredRun) -> str:
    """Describe the memory at the peak."""
    from fsdp_inspect.analysis.memory.overview import measure_memory_overview
    from fsdp_inspect.report.memory_wording import render_memory

    return _print(render_memory(measure_memory_overview(run)))


# --- several ranks, if the tests run on several


def _agree(folder: Path) -> Path:
    """Return rank 0's folder on every rank, so that each rank records a part of one run."""
    import torch.distributed as dist

    if not _has_real_peers():
        return folder
    chosen = [str(folder)]
    dist.broadcast_object_list(chosen)
    return Path(chosen[0])


def _open_recorded(recorder: Recorder) -> StoredRun:
    """Open the run after every rank has finished its part."""
    import torch.distributed as dist

    from fsdp_inspect.store.reader import open_run

    if _has_real_peers():
        dist.barrier()
    if recorder.run_folder is None:
        pytest.fail(
            f"Nothing was recorded: {' '.join(recorder.problems) or 'the recorder is disabled'}. "
            "Expected a run folder below pytest's temporary folder. Check the warnings.",
            pytrace=False,
        )
    return open_run(recorder.run_folder)


def _is_first_rank() -> bool:
    import torch.distributed as dist

    return not _has_real_peers() or dist.get_rank() == 0


def _has_real_peers() -> bool:
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return False
    return dist.get_backend() != "fake"
