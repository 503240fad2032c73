"""Which runs stand on which side of a comparison, and which run stands for a side?"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from string import ascii_uppercase

from fsdp_inspect.analysis.summary import Summary, measure_summary
from fsdp_inspect.comparison.settings import are_repeats
from fsdp_inspect.trace.run import RunManifest, RunSource


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A run of a side, with the answers of every analysis."""

    manifest: RunManifest
    digest: Summary

    @property
    def step_time_ns(self) -> int | None:
        """Its typical step; None without a timed step."""
        times = self.digest.step_time_ns
        return times.typical if times else None


@dataclass(frozen=True, slots=True)
class MeasuredSide:
    """One side: a run, or several that repeat it."""

    label: str
    """`A` for the reference, then `B`, `C`, ..."""
    runs: tuple[MeasuredRun, ...]
    median_run: MeasuredRun
    """The run whose step time is the median of the side's (the lower of two); a real run, whose
    breakdown and units stand for the side. Runs without a timed step come last."""


def form_sides(
    given: Sequence[RunSource | Sequence[RunSource]],
    *,
    digest: Callable[[RunSource], Summary] = measure_summary,
) -> tuple[MeasuredSide, ...]:
    """Sort runs into sides, in the order in which they are met.

    Args:
        given: Runs, or lists of runs. A list is a side as it is. Runs that were not listed are
            taken together where their settings are the same, unless that leaves one side only:
            runs of one configuration are then compared with each other, which shows the noise.
        digest: Gives the digest of a run, for a caller that may have it already; called once a
            run.

    Raises:
        ValueError: There is nothing to compare.
    """
    if len(given) < 2 or any(isinstance(one, Sequence) and not one for one in given):
        raise ValueError(
            f"compare_runs needs at least two runs or non-empty lists of runs, got {len(given)}."
        )
    listed = [list(one) if isinstance(one, Sequence) else [one] for one in given]
    groups = listed
    if all(len(members) == 1 for members in listed):
        joined = _join_repeats([members[0] for members in listed])
        groups = joined if len(joined) > 1 else listed
    return tuple(_side(label_of(place), members, digest) for place, members in enumerate(groups))


def label_of(place: int) -> str:
    """`A` to `Z`, then `A1` to `Z1`, and so on."""
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


def _standing(run: MeasuredRun) -> tuple[bool, int]:
    return run.step_time_ns is None, run.step_time_ns or 0
