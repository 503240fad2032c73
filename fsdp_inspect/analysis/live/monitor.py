"""Which numbers of a run does a monitor keep? The same, whether it ended or goes on."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdp_inspect.analysis.live.feed import LiveFeed, LiveState, LiveStatus
from fsdp_inspect.analysis.live.view import TYPICAL_STEPS
from fsdp_inspect.analysis.memory.allocator import measure_allocator
from fsdp_inspect.analysis.memory.peak import measure_memory
from fsdp_inspect.analysis.provenance import measure_provenance
from fsdp_inspect.analysis.rank_numbers import RankNumbers, measure_rank_numbers
from fsdp_inspect.analysis.step_selection import steps_by_rank, timed_ranks
from fsdp_inspect.store.reader import StoredRun
from fsdp_inspect.trace.run import RunManifest, RunSource, RunStatus

MOST_RANKS = 16
"""So many ranks are told unless others are asked for."""
_STATES = {
    RunStatus.RUNNING: LiveState.RUNNING,
    RunStatus.CRASHED: LiveState.DIED,
    RunStatus.FAILED: LiveState.FAILED,
}
_OF_A_UNIT = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True, slots=True)
class MonitoredRank:
    """One rank."""

    rank: int
    numbers: RankNumbers | None
    """None before its first timed step."""
    allocated_bytes: int | None
    """Highest; None where memory was not counted."""
    reserved_bytes: int | None
    """None on CPU, like the next three."""
    reserved_ratio: float | None
    """Of the device's memory, 0 to 1."""
    num_alloc_retries: int | None
    """Since the first sample, as the next."""
    num_ooms: int | None
    memory_method: str
    """Who counted it; empty where nobody did."""
    scalars: Mapping[str, float]
    """The last value of each number that the training loop logged."""
    step_method: str
    """How the times of steps were obtained: `measured`, ..."""
    gather_method: str
    unit_method: str
    """Of all collectives of units."""

    @property
    def data_ratio(self) -> float | None:
        """Waiting for the next batch as a share of the step; None before the first timed step."""
        if self.numbers is None or not self.numbers.step_time_ns:
            return None
        return self.numbers.data_ns / self.numbers.step_time_ns


@dataclass(frozen=True, slots=True)
class MonitoredRun:
    """A run at one moment, or as it ended."""

    manifest: RunManifest
    state: LiveState
    over: str
    """Which steps the typical step is taken from, in words."""
    ranks: tuple[MonitoredRank, ...]


def choose_ranks(run: RunSource, asked: Collection[int] | None) -> tuple[int, ...]:
    """The ranks to tell of; by default the first `MOST_RANKS` that wrote something."""
    known = sorted(record.rank for record in run.ranks)
    return tuple(known[:MOST_RANKS] if asked is None else sorted(asked))


def monitor_run(run: RunSource, ranks: Collection[int]) -> MonitoredRun:
    """The numbers of a whole run: its typical step."""
    members = {member.rank: member for member in timed_ranks(run).members}
    memory = {row.rank: row for row in measure_memory(run).ranks}
    provenance = measure_provenance(run)
    methods = provenance.methods if provenance else {}
    told = []
    for record in run.ranks:
        if record.rank not in ranks:
            continue
        member, held = members.get(record.rank), memory.get(record.rank)
        use = measure_allocator(run, rank=record.rank)
        told.append(
            MonitoredRank(
                rank=record.rank,
                numbers=measure_rank_numbers(member, run.manifest.units) if member else None,
                allocated_bytes=held.peak_allocated_bytes if held else None,
                reserved_bytes=held.peak_reserved_bytes if held else None,
                reserved_ratio=held.device_ratio if held else None,
                num_alloc_retries=use.num_alloc_retries if use else None,
                num_ooms=use.num_ooms if use else None,
                memory_method=held.method if held else "",
                scalars=_last_logged(run, record.rank, record.scalar_names),
                **_name_methods(methods),
            )
        )
    state = _STATES.get(run.status, LiveState.ENDED)
    return MonitoredRun(run.manifest, state, "the timed steps of the run", tuple(told))


def _last_logged(run: RunSource, rank: int, names: Sequence[str]) -> dict[str, float]:
    table = run.scalars(rank)
    last = dict(zip(table.name.tolist(), table.value.tolist(), strict=True))
    return {names[index]: value for index, value in last.items() if index < len(names)}


def _name_methods(methods: Mapping[str, str]) -> dict[str, str]:
    of_units = {
        method for group in _OF_A_UNIT for method in methods.get(group, "").split(", ") if method
    }
    return {
        "step_method": methods.get("step", ""),
        "gather_method": methods.get("all_gather", ""),
        "unit_method": ", ".join(sorted(of_units)),
    }


class Monitor:
    """Follows some ranks of a run that is being recorded, by what is new at each look."""

    def __init__(self, path: Path, attempt: int, ranks: Sequence[int]) -> None:
        """Read nothing yet."""
        self._feeds = {rank: LiveFeed(path, attempt, rank) for rank in ranks}

    def look(self, run: StoredRun) -> MonitoredRun:
        """The numbers now: the typical step of the last ones.

        Raises:
            StoreError: A stream is damaged.
            OSError: A stream cannot be read.
        """
        seen = [feed.look(run) for feed in self._feeds.values()]
        state = seen[0].state if seen else LiveState.STARTING
        ranks = tuple(_tell(live, run.manifest) for live in seen)
        return MonitoredRun(run.manifest, state, f"the last {TYPICAL_STEPS} steps", ranks)


def _tell(live: LiveStatus, manifest: RunManifest) -> MonitoredRank:
    view = live.view
    member = next(steps_by_rank(view.recent), None)
    recent = view.memory[-TYPICAL_STEPS:]
    reserved = [one.reserved_bytes for one in recent if one.reserved_bytes is not None]
    highest = max(reserved, default=None)
    own = next((one for one in live.ranks if one.rank == live.rank), None)
    device = own.device_memory_bytes if own else None
    return MonitoredRank(
        rank=live.rank,
        numbers=measure_rank_numbers(member, manifest.units) if member else None,
        allocated_bytes=max((one.allocated_bytes for one in recent), default=None),
        reserved_bytes=highest,
        reserved_ratio=highest / device if highest is not None and device else None,
        num_alloc_retries=view.num_alloc_retries,
        num_ooms=view.num_ooms,
        memory_method=own.memory_from if own else "",
        scalars={scalar.name: scalar.value for scalar in view.scalars},
        **_name_methods(view.methods),
    )
