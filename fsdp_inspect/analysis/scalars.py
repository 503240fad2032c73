"""Read the numbers that the training loop logged, such as the loss."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_inspect.trace.run import RunSource
from fsdp_inspect.trace.tables import ScalarTable

_OF_VALIDATION = re.compile(
    r"(?<![a-z])(val|valid|validation|dev|test|eval|evaluation)(?![a-z])", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class ScalarSeries:
    """One logged number over steps, from the lowest rank that logged it."""

    name: str
    rank: int
    steps: tuple[int, ...]
    """The steps, ascending. If a step is logged twice, its last value counts."""
    values: tuple[float, ...]


def measure_scalars(run: RunSource) -> tuple[ScalarSeries, ...]:
    """Return every number that the training loop logged, by name; empty without any."""
    series: dict[str, ScalarSeries] = {}
    for record in sorted(run.ranks, key=lambda record: record.rank):
        if series.keys() >= {*record.scalar_names}:
            continue  # all ranks may log the same loss: read the first only
        table = run.scalars(record.rank)
        for index, name in enumerate(record.scalar_names):
            logged = table.where(table.name == index)
            if name not in series and len(logged):
                series[name] = _make_series(name, record.rank, logged)
    return tuple(series[name] for name in sorted(series))


def is_training_loss(name: str) -> bool:
    """Whether a logged number is a loss, and not that of a validation."""
    return "loss" in name.lower() and not _OF_VALIDATION.search(name)


def measure_loss(run: RunSource) -> ScalarSeries | None:
    """The loss of the training that the loop logged, as `find_loss` chooses it."""
    return find_loss(measure_scalars(run))


def find_loss(logged: Sequence[ScalarSeries]) -> ScalarSeries | None:
    """The loss of the training: `loss`, or else a name with it; None: none was logged.

    Of several names, one with `train` comes first, then one with `avg` or `mean`.
    """
    losses = [series for series in logged if is_training_loss(series.name)]
    return min(losses, key=lambda series: _standing(series.name.lower()), default=None)


def _standing(name: str) -> tuple[bool, bool, bool, str]:
    is_mean = "avg" in name or "mean" in name
    return name != "loss", "train" not in name, not is_mean, name


def _make_series(name: str, rank: int, logged: ScalarTable) -> ScalarSeries:
    last_of_step = dict(zip(logged.step.tolist(), logged.value.tolist(), strict=True))
    steps = tuple(sorted(last_of_step))
    return ScalarSeries(name, rank, steps, tuple(last_of_step[step] for step in steps))
