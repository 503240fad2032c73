"""Write the numbers of a run as OpenMetrics 1.0 text.

A number that torchtitan also reports (`torchtitan/components/metrics.py`) has torchtitan's name in
a valid form: a slash becomes an underscore, and the name ends in the base unit of its values. All
other names begin with `fsdp_`. Names of units and of logged numbers are escaped labels.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from prometheus_client.core import Metric
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST, generate_latest

from fsdp_inspect.analysis.live.feed import LiveState
from fsdp_inspect.analysis.live.monitor import MonitoredRank, MonitoredRun
from fsdp_inspect.diagnosis.diagnose import Diagnosis, ProblemClass
from fsdp_inspect.formatting import make_encodable

CONTENT_TYPE = CONTENT_TYPE_LATEST

_NS_PER_S = 1e9
_UNITS = ("seconds", "bytes", "ratio")
_GIB = float(2**30)
_PCT = 0.01
_OF_COLLECTIVES = ("exposed_ns", "communication_ns")
_SINCE = "As the allocator counts them, since the first sample of the recording."

TORCHTITAN_LOGGED: Mapping[str, tuple[str, float]] = {
    "throughput(tps)": ("throughput_tps", 1.0),
    "tflops": ("tflops", 1.0),
    "mfu(%)": ("mfu_ratio", _PCT),
    "grad_norm": ("grad_norm", 1.0),
    "ntokens_seen": ("ntokens_seen", 1.0),
    "loss_metrics/global_avg_loss": ("loss_metrics_global_avg_loss", 1.0),
    "loss_metrics/global_max_loss": ("loss_metrics_global_max_loss", 1.0),
    "time_metrics/data_loading(%)": ("time_metrics_data_loading_ratio", _PCT),
    "memory/max_active(GiB)": ("memory_max_active_bytes", _GIB),
    "memory/max_active(%)": ("memory_max_active_ratio", _PCT),
    "memory/max_reserved(%)": ("memory_max_reserved_ratio", _PCT),
    "memory/num_alloc_retries": ("memory_num_alloc_retries", 1.0),
    "memory/num_ooms": ("memory_num_ooms", 1.0),
}
"""Names under which a training loop may log a torchtitan metric; a recorded value has precedence.
Maps the logged name to the exported name, and the factor that converts to its unit."""


class FamilyType(StrEnum):
    """The type of a metric."""

    GAUGE = "gauge"
    INFO = "info"
    STATESET = "stateset"


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of a metric."""

    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Family:
    """One metric with all its samples."""

    name: str
    help: str
    samples: tuple[Sample, ...]
    type: FamilyType = FamilyType.GAUGE

    @property
    def unit(self) -> str:
        """The unit of the values, in which the name ends; empty: none."""
        end = self.name.rpartition("_")[2]
        return end if end in _UNITS else ""


@dataclass(frozen=True, slots=True)
class MetricsExport:
    """A written file."""

    path: Path
    num_families: int
    num_samples: int


def render_openmetrics(families: Iterable[Family]) -> str:
    """Render metrics as text with the end mark; metrics without a sample are left out."""
    metrics = [_as_metric(family) for family in families if family.samples]
    text: bytes = generate_latest(_Collected(metrics))  # type: ignore[no-untyped-call]
    return text.decode()


@dataclass(frozen=True, slots=True)
class _Collected:
    """A registry of metrics that are already collected."""

    metrics: list[Metric]

    def collect(self) -> list[Metric]:
        """Return the metrics to `generate_latest`."""
        return self.metrics


def _as_metric(family: Family) -> Metric:
    metric = Metric(family.name, make_encodable(family.help), family.type.value, family.unit)
    name = f"{family.name}_info" if family.type is FamilyType.INFO else family.name
    for sample in family.samples:
        labels = {label: make_encodable(value) for label, value in sample.labels.items()}
        metric.add_sample(name, labels, sample.value)
    return metric


def write_openmetrics(
    run: MonitoredRun, found: Diagnosis, path: Path, *, place: Path
) -> MetricsExport:
    """Write the numbers of a run to a file.

    Args:
        run: The run to export.
        found: The diagnosis of the run.
        path: The path to state in the result.
        place: The path to write to.
    """
    families = [family for family in find_families(run, found) if family.samples]
    place.write_text(render_openmetrics(families), encoding="utf-8")
    return MetricsExport(path, len(families), sum(len(one.samples) for one in families))


# --- metrics of a run


def find_families(run: MonitoredRun, found: Diagnosis) -> list[Family]:
    """Every metric of a run; metrics without a measurement have no samples.

    Args:
        run: The run to export.
        found: The diagnosis of the run.
    """
    families = [
        *_about(run),
        *_of_diagnosis(found),
        *_of_steps(run),
        *_of_ranks(run),
        *_of_units(run),
        *_logged(run),
    ]
    joined: dict[str, Family] = {}
    for family in families:
        joined[family.name] = _join(joined.get(family.name), family)
    return list(joined.values())


def _join(recorded: Family | None, logged: Family) -> Family:
    """Join a recorded and a logged metric: for each rank, the recorded value has precedence."""
    if recorded is None:
        return logged
    ranks = {sample.labels["rank"] for sample in recorded.samples}
    others = [sample for sample in logged.samples if sample.labels["rank"] not in ranks]
    return replace(recorded, samples=(*recorded.samples, *others))


def _about(run: MonitoredRun) -> Iterator[Family]:
    manifest = run.manifest
    known = {
        "run_id": manifest.run_id,
        "name": manifest.name,
        "source": manifest.source,
        "model": manifest.model.class_name,
        "torch": manifest.versions.get("torch", ""),
        "world_size": str(manifest.world_size),
    }
    yield Family("fsdp_run", "Facts about the run.", (Sample(known, 1),), type=FamilyType.INFO)
    yield Family(
        "fsdp_run_state",
        "State of the run.",
        tuple(Sample({"fsdp_run_state": one.value}, one is run.state) for one in LiveState),
        type=FamilyType.STATESET,
    )


def _of_diagnosis(found: Diagnosis) -> Iterator[Family]:
    """Metrics for alerts: the class, the culprits, and how long each rank has been silent."""
    yield Family(
        "fsdp_problem",
        "Class of the problem, as fsdp-inspect diagnose reports it; all 0 without a known problem.",
        tuple(Sample({"fsdp_problem": one.value}, one is found.problem) for one in ProblemClass),
        type=FamilyType.STATESET,
    )
    if found.is_problem:
        yield Family(
            "fsdp_problem_certain",
            "1 if the records prove the class of the problem, 0 if it is only probable.",
            (Sample({}, found.is_certain),),
        )
    yield Family(
        "fsdp_problem_rank",
        "1 for each rank that the diagnosis names.",
        tuple(Sample({"rank": str(rank)}, 1) for rank in found.ranks),
    )
    yield Family(
        "fsdp_since_collective_seconds",
        "Time since a collective of the rank was issued or ended, up to its last sign of life.",
        tuple(
            Sample({"rank": str(state.rank)}, state.idle_s)
            for state in found.states
            if state.idle_s is not None
        ),
    )


def _of_steps(run: MonitoredRun) -> Iterator[Family]:
    known = [(rank, rank.numbers) for rank in run.ranks if rank.numbers is not None]

    def seconds(name: str, help_: str, key: str) -> Family:
        over = run.detailed if key in _OF_COLLECTIVES else run.over
        return Family(
            name,
            f"{help_} Typical step of {over}.",
            tuple(
                Sample(_labels(run, rank, rank.step_method), value / _NS_PER_S)
                for rank, numbers in known
                if (value := getattr(numbers, key)) is not None
            ),
        )

    yield Family(
        "fsdp_last_step",
        "Number of the last step that ended, from 0.",
        tuple(
            Sample(_labels(run, rank, rank.step_method), rank.last_step)
            for rank in run.ranks
            if rank.last_step is not None
        ),
    )
    yield seconds("time_metrics_end_to_end_seconds", "Time of a step.", "step_time_ns")
    yield seconds("time_metrics_data_loading_seconds", "Waiting for the next batch.", "data_ns")
    yield seconds(
        "fsdp_exposed_seconds", "Waiting for communication that runs, in a step.", "exposed_ns"
    )
    yield seconds(
        "fsdp_communication_seconds",
        "Union of the running collectives of a step.",
        "communication_ns",
    )


def _of_ranks(run: MonitoredRun) -> Iterator[Family]:
    """Metrics with one number for each rank, besides the times of its steps."""
    over = f"typical step of {run.over}"
    numbers = (
        ("time_metrics_data_loading_ratio", f"Data loading / step, {over}.", "data_ratio"),
        ("fsdp_peak_allocated_bytes", "Highest bytes held by tensors.", "allocated_bytes"),
        ("memory_max_reserved_bytes", "Highest bytes of the allocator.", "reserved_bytes"),
        (
            "memory_max_reserved_ratio",
            "Highest bytes of the allocator / memory of the device.",
            "reserved_ratio",
        ),
        ("memory_num_alloc_retries", _SINCE, "num_alloc_retries"),
        ("memory_num_ooms", _SINCE, "num_ooms"),
    )
    for name, help_, key in numbers:
        method = "step_method" if key == "data_ratio" else "memory_method"
        yield Family(
            name,
            help_,
            tuple(
                Sample(_labels(run, rank, getattr(rank, method)), getattr(rank, key))
                for rank in run.ranks
                if getattr(rank, key) is not None
            ),
        )


def _of_units(run: MonitoredRun) -> Iterator[Family]:
    costs = (
        ("fsdp_unit_exposed_seconds", "Waiting for a unit's collectives.", "exposed_ns"),
        ("fsdp_unit_all_gather_seconds", "A unit's all-gathers in flight.", "all_gather_ns"),
    )
    for name, help_, key in costs:
        yield Family(
            name,
            f"{help_} In the typical step of {run.detailed}.",
            tuple(
                Sample(
                    {"unit": unit.name, **_labels(run, rank, _method(rank, key))},
                    getattr(unit, key) / _NS_PER_S,
                )
                for rank in run.ranks
                if rank.numbers is not None and (key == "exposed_ns" or rank.gather_method)
                for unit in rank.numbers.units
            ),
        )


def _method(rank: MonitoredRank, key: str) -> str:
    return rank.gather_method if key == "all_gather_ns" else rank.unit_method


def _logged(run: MonitoredRun) -> Iterator[Family]:
    for logged, (name, factor) in TORCHTITAN_LOGGED.items():
        yield Family(
            name,
            f"As the training loop logged {logged}.",
            tuple(
                Sample(_labels(run, rank, "logged"), rank.scalars[logged].value * factor)
                for rank in run.ranks
                if logged in rank.scalars
            ),
        )
    yield Family(
        "fsdp_logged",
        "Other numbers that the training loop logged, by name.",
        tuple(
            Sample({"name": name, **_labels(run, rank, "logged")}, scalar.value)
            for rank in run.ranks
            for name, scalar in sorted(rank.scalars.items())
            if name not in TORCHTITAN_LOGGED
        ),
    )


def _labels(run: MonitoredRun, rank: MonitoredRank, method: str) -> dict[str, str]:
    return {"rank": str(rank.rank), "source": run.manifest.source, "method": method}
