"""Group runs into the sides of a comparison, and select the median run of each side."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from string import ascii_uppercase

from fsdp_inspect.analysis.summary import Summary, measure_summary
from fsdp_inspect.comparison.settings import are_repeats
from fsdp_inspect.trace.run import RunManifest, RunSource


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A run of a side, with the results of all analyses."""

    manifest: RunManifest
    digest: Summary

    @property
    def step_time_ns(self) -> int | None:
        """Duration of the run's typical step; None without a timed step."""
        times = self.digest.step_time_ns
        return times.typical if times else None


@dataclass(frozen=True, slots=True)
class MeasuredSide:
    """One side: a run, or several repeats of it."""

    label: str
    """`A` for the reference, then `B`, `C`, ...; or the name of the median run."""
    runs: tuple[MeasuredRun, ...]
    median_run: MeasuredRun
    """The run with the side's median step time (the lower one of two). Its breakdown and units
    represent the side. Runs without a timed step come last."""


def form_sides(
    given: Sequence[RunSource | Sequence[RunSource]],
    *,
    digest: Callable[[RunSource], Summary] = measure_summary,
    names: Mapping[str, str] | None = None,
) -> tuple[MeasuredSide, ...]:
    """Group runs into sides, in their order.

    Args:
        given: Runs, or lists of runs. A list is one side. Single runs with the same settings form
            one side. If that leaves one side only, each run is its own side: the comparison of
            runs of one configuration shows the noise.
        digest: Returns the summary of a run, so that a caller can pass a cached one; called once
            per run.
        names: Different names by run id. Each side has the name of its median run as its label.

    Raises:
        ValueError: There are fewer than two sides, or one of them is empty.
    """
    if len(given) < 2 or any(isinstance(side, Sequence) and not side for side in given):
        raise ValueError(
            f"A comparison needs at least two runs or non-empty lists of runs, got {len(given)}. "
            "Add a run to compare with."
        )
    listed = [list(side) if isinstance(side, Sequence) else [side] for side in given]
    groups = listed
    if all(len(members) == 1 for members in listed):
        joined = _join_repeats([members[0] for members in listed])
        groups = joined if len(joined) > 1 else listed
    sides = (_side(label_of(place), members, digest) for place, members in enumerate(groups))
    return tuple(_named(side, names or {}) for side in sides)


def label_of(place: int) -> str:
    """Return `A` to `Z`, then `A1` to `Z1`, and so on."""
    number, letter = divmod(place, len(ascii_uppercase))
    return f"{ascii_uppercase[letter]}{number or ''}"


def _join_repeats(runs: Sequence[RunSource]) -> list[list[RunSource]]:
    groups: list[list[RunSource]] = []
    for run in runs:
        for group in groups:
            if are_repeats(group[0].manifest, run.manifest):
                group.append(run)
                break
        else:
            groups.append([run])
    return groups


def _side(
    label: str, runs: Sequence[RunSource], digest: Callable[[RunSource], Summary]
) -> MeasuredSide:
    digested = tuple(MeasuredRun(run.manifest, digest(run)) for run in runs)
    ordered = sorted(digested, key=_standing)
    timed = [run for run in ordered if run.step_time_ns is not None]
    candidates = timed or ordered
    return MeasuredSide(label, digested, candidates[(len(candidates) - 1) // 2])


def _named(side: MeasuredSide, names: Mapping[str, str]) -> MeasuredSide:
    return replace(side, label=names.get(side.median_run.manifest.run_id, side.label))


def _standing(run: MeasuredRun) -> tuple[bool, int]:
    return run.step_time_ns is None, run.step_time_ns or 0
