"""What did the training loop log: does the loss fall?"""

from dataclasses import dataclass

from fsdp_inspect.trace.run import RunSource


@dataclass(frozen=True, slots=True)
class ScalarSeries:
    """One logged number over steps, as the lowest rank that logged it wrote it."""

    name: str
    rank: int
    steps: tuple[int, ...]
    """Ascending; a step logged twice keeps its last value."""
    values: tuple[float, ...]


def measure_scalars(run: RunSource) -> tuple[ScalarSeries, ...]:
    """Every number that the training loop logged, by name; empty if it logged none."""
    series: dict[str, ScalarSeries] = {}
    for record in sorted(run.ranks, key=lambda record: record.rank):
        table = run.scalars(record.rank) if record.scalar_names else None
        for index, name in enumerate(record.scalar_names):
            if table is None or name in series:
                continue
            logged = table.where(table.name == index)
            last_of_step = {
                int(step): float(value)
                for step, value in zip(logged.step, logged.value, strict=True)
            }
            if last_of_step:
                steps = tuple(sorted(last_of_step))
                values = tuple(last_of_step[step] for step in steps)
                series[name] = ScalarSeries(name, record.rank, steps, values)
    return tuple(series[name] for name in sorted(series))
