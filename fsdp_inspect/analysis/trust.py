"""State what the evidence of a run allows to say about a time, a cause or a prediction.

`Trust` has one object per run. Commands, pages, reports, JSON and prediction files ask it before
they state a late rank or a prediction. It answers with a caveat, or with a refusal.

[Note: missing cores] Other programs, too many workers of data loaders and a small CPU quota show
only in the scheduler's counters: on the host's clock, a thread without a core looks like a thread
that works slowly. A run delay up to `MOST_DIFFERENCE` counts as a quiet machine.

[Note: pages from a disk] A process whose memory was swapped out, or that maps files into memory,
stands until the kernel has read a page. Only the second half of a recording counts, because a
program reads its own code at its start.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from fsdp_inspect.analysis.breakdown import measure_breakdown
from fsdp_inspect.analysis.context import remember
from fsdp_inspect.analysis.drift import ChangePoint, LongSteps, measure_drift
from fsdp_inspect.analysis.memory.growth import find_growth
from fsdp_inspect.analysis.plain_steps import OtherPlainSteps, measure_other_plain_steps
from fsdp_inspect.analysis.step_selection import inspected_rank
from fsdp_inspect.errors import MissingDataError, StoreError
from fsdp_inspect.formatting import (
    capitalize,
    format_bytes,
    format_ns,
    format_ranks,
    format_ratio,
    plural,
)
from fsdp_inspect.statistics import half_range_ratio
from fsdp_inspect.trace.host_work import LEAST_FAULTS_PER_S, LEAST_SWAP_BYTES
from fsdp_inspect.trace.run import RunSource
from fsdp_inspect.trace.tables import MISSING_INT

MOST_DIFFERENCE = 0.05
"""The largest difference of run delay between comparable sides. A larger one shows that other
programs used the cores of one side."""
CORES_RATIO = 0.25
"""The fraction of the time in which a training thread has no core, from which no other time can be
trusted."""
MAX_REPLAY_ERROR = 0.05
"""The largest error of the self-check with which plans are predicted and ranked."""
LEAST_MEMORY_MARGIN = 0.02
"""Measured peaks of 16 proposed plans exceeded their predictions by up to 1.1%."""
MAX_MEMORY_ERROR = 0.02
"""The largest error of the simulated peak of the recorded plan with which other peaks are
predicted."""
MAX_OTHER_RATIO = 0.1
"""The largest fraction of steps of other kinds without a caveat."""
MAX_SPREAD_RATIO = 0.1
"""The largest `Trust.spread_ratio` without a caveat."""
PROCESS_SPREAD_RATIO = 0.04
"""Error of a step whose units stay as recorded, as a fraction of the step: 90% of 12 validation
runs were closer (docs/figures.md). It contains the spread between equal runs."""
REGROUPING_RATIO = 0.085
"""Further error of a step with other units. With both, 90% of 12 validation runs were closer: the
compute itself changes with the units, because other data is in the processor's caches."""
HOST_CAVEAT_RATIO = 0.25
"""The fraction of a step in which the host is behind the device, from which predictions say so."""
HOST_PLAN_RATIO = 0.12
"""Error of a predicted step, as a fraction of the time in which the host is behind. How the host's
time changes with a plan is inferred. Twice the error of the one pair of runs on an H100, 5% of the
step at 90% (docs/figures.md)."""
PIPELINE_CAVEAT = (
    "The run is a pipeline. Waits for other stages stay as recorded in every prediction, although "
    "they change with the time of each stage."
)
_LEAST_PAGING_NS = 2_000_000_000
_MOST_RANKS = 64
_MOST_NAMED = 4


@dataclass(frozen=True, slots=True)
class RunDelay:
    """The rank whose training thread waits longest for a core."""

    rank: int
    ratio: float
    """Fraction of the recording in which the thread is ready but has no core, as the Linux
    scheduler measures it."""


@dataclass(frozen=True, slots=True)
class Paging:
    """The rank whose process reads most pages from a disk."""

    rank: int
    faults_per_s: float
    """Major page faults."""
    swap_bytes: int
    """Memory of the process in swap at the end; 0 if unknown."""


@dataclass(frozen=True, slots=True)
class Trust:
    """The evidence of a run for and against statements. The defaults are those of a good run.

    The self-check and the memory error describe a simulation of the run, if there is one.
    """

    run_id: str = ""
    run_delay: RunDelay | None = None
    """None: unknown, as in imports, predictions, and on systems other than Linux."""
    paging: Paging | None = None
    """None: no rank reads many pages from a disk, or it is unknown."""
    growth_bytes_per_step: float | None = None
    """None: the memory does not grow from step to step, or it is unknown."""
    missing_ranks: tuple[int, ...] = ()
    """Ranks without data that took part."""
    self_check_error: float = 0.0
    """Simulated / measured step time of the recorded plan, - 1."""
    memory_error: float | None = None
    """Simulated / measured peak of the recorded plan in its memory step, - 1; None: unknown."""
    higher_peak_ratio: float = 0.0
    """The highest peak of all steps / that of the simulated memory step, - 1."""
    spread_ratio: float = 0.0
    """Half of the range of the durations of the typical steps, as a fraction of their mean."""
    num_steps: int = 0
    """The typical steps; in a simulation, those of the most frequent kind."""
    late_ratio: float = 0.0
    """In a simulation, the waits for ranks that work longer, as a fraction of the step."""
    num_other_steps: int = 0
    """Steps as typical in time, but with other passes or collectives."""
    host_behind_ratio: float = 0.0
    """Time in which the host is behind the device, as a fraction of the typical step; see [Note:
    the host behind the device] in `store.reduction.step_parts`. 0 without a device."""
    network_ratio: float = 0.0
    """`Network.unexplained_ratio`: how much the durations of collectives vary for a reason that the
    run does not show. 0 if their latency is known."""
    is_pipeline: bool = False
    """Whether the rank sends to others or receives from them in these steps."""
    other_plain_steps: OtherPlainSteps | None = None
    """None: plain and detailed steps do not differ clearly in time."""
    has_other_order: bool = False
    """Whether the ranks issued different collectives, which the recorder saw."""
    long_steps: LongSteps | None = None
    """Rare steps that cost time, which no typical step shows."""
    step_changes: tuple[ChangePoint, ...] = ()
    """The steps at which the step time changes."""

    @property
    def run_delay_ratio(self) -> float:
        """The `RunDelay.ratio`; 0 if it is unknown."""
        return self.run_delay.ratio if self.run_delay else 0.0

    # --- measured times, and causes of waits

    @property
    def time_caveat(self) -> str | None:
        """What every time of the run needs, in sentences; None: nothing."""
        return " ".join(filter(None, (self._cores_caveat, self.caveat_beside_cores))) or None

    @property
    def caveat_beside_cores(self) -> str | None:
        """The same without missing cores, where a headline states these; None: nothing."""
        long_steps = None if self.long_steps is None else self.long_steps.sentence
        found = (self._paging_caveat, self.other_plain_steps_caveat, long_steps)
        return " ".join(filter(None, found)) or None

    @property
    def other_plain_steps_caveat(self) -> str | None:
        """The times of plain and detailed steps; None: they do not differ clearly."""
        return None if self.other_plain_steps is None else self.other_plain_steps.sentence

    @property
    def _cores_caveat(self) -> str | None:
        """See [Note: missing cores]."""
        if self.run_delay_ratio <= MOST_DIFFERENCE:
            return None
        return (
            f"The training thread had no CPU core for {format_ratio(self.run_delay_ratio)} of the "
            "recording. Times are too long by an unknown part of it, and a late rank or a wait may "
            "be a missing core. Record again on free cores."
        )

    @property
    def _paging_caveat(self) -> str | None:
        """What pages from a disk do to the times. See [Note: pages from a disk]."""
        if self.paging is None:
            return None
        swapped = self.paging.swap_bytes >= LEAST_SWAP_BYTES
        held = f" and has {format_bytes(self.paging.swap_bytes)} of its memory in swap"
        remedy = (
            "Give the job more memory, or keep less of it on the host: fewer workers of data "
            "loaders, no offload."
            if swapped
            else "Its memory-mapped files, or its code, are not in the host's memory."
        )
        return (
            f"Rank {self.paging.rank} reads {self.paging.faults_per_s:,.0f} pages per second from "
            f"a disk{held if swapped else ''}. Measured times contain an unknown part of these "
            f"reads. {remedy}"
        )

    @property
    def wait_caveat(self) -> str | None:
        """The sentence that every cause of a wait needs; None: none."""
        if not self.missing_ranks:
            return None
        them = "it" if len(self.missing_ranks) == 1 else "them"
        return capitalize(f"{self._missing}, so a wait for {them} looks like communication.")

    def are_cores_first(self, cost_ratio: float = 0.0) -> bool:
        """Whether missing cores come before a cause that costs this fraction of the step."""
        return self.run_delay_ratio >= max(CORES_RATIO, cost_ratio)

    @property
    def cores_headline(self) -> str:
        """The headline where `are_cores_first`."""
        share = format_ratio(self.run_delay_ratio)
        return f"Training threads have no CPU core for {share} of the time."

    def refuse_no_straggler(self, *, is_replayed: bool) -> str | None:
        """Why it is unknown whether a rank is late if no recorded one is, as a clause.

        Args:
            is_replayed: Whether the cost of a late rank could be known.
        """
        if self.are_cores_first():
            return (
                f"training threads had no CPU core for {format_ratio(self.run_delay_ratio)} of the "
                "time."
            )
        if self.other_plain_steps is not None and self.other_plain_steps.are_longer:
            return "plain steps take longer, and only detailed steps show the work of each rank."
        return f"{self._missing}." if self.missing_ranks and is_replayed else None

    @property
    def _missing(self) -> str:
        """`rank 2 is not recorded`."""
        ranks, count = self.missing_ranks, len(self.missing_ranks)
        named = format_ranks(ranks) if count <= _MOST_NAMED else plural(count, "rank")
        return f"{named} {'is' if count == 1 else 'are'} not recorded"

    # --- predictions

    def expect_prediction(self) -> None:
        """Check that the simulation describes the run well enough to predict a plan.

        Raises:
            MissingDataError: The error of the self-check is too large.
        """
        if abs(self.self_check_error) > MAX_REPLAY_ERROR:
            raise MissingDataError(
                f"Changes of run {self.run_id!r} cannot be predicted: the simulation of the "
                f"recorded step is off by {self.self_check_error:+.1%}. Expected at most "
                f"{MAX_REPLAY_ERROR:.0%}. {self._remedies} If the error stays, the simulation does "
                "not support this loop."
            )

    @property
    def _remedies(self) -> str:
        """What the run shows that a mean step does not describe, each with its remedy."""
        late = (
            f"The rank waits for ranks that work longer for {format_ratio(self.late_ratio)} of the "
            "step. `fsdp-inspect show RUN ranks` compares their work."
        )
        kinds = f"{self._other_kinds}: record steps of one kind."
        found = (
            late if self.late_ratio else None,
            kinds if self.has_several_kinds else None,
            f"{self.cores_headline} Record again on free cores."
            if self.run_delay_ratio > MOST_DIFFERENCE
            else None,
        )
        shown = " ".join(each for each in found if each is not None)
        return f"Possible reasons: {shown}" if shown else "Record more steps on a quiet machine."

    @property
    def memory_margin(self) -> float:
        """How far a run may exceed the predicted peak of its plan, as a fraction of the peak."""
        return self._memory_error_margin + self.higher_peak_ratio

    @property
    def _memory_error_margin(self) -> float:
        """The part of `memory_margin` for errors of the simulation, in both directions.

        A self-check without an error shows nothing on other plans: `LEAST_MEMORY_MARGIN` remains.
        """
        return LEAST_MEMORY_MARGIN + abs(self.memory_error or 0.0)

    def peak_range_bytes(self, peak_bytes: int) -> tuple[int, int]:
        """The interval of the predicted peak of another plan, up to its highest step, bytes."""
        low, high = self._memory_error_margin, self.memory_margin
        return peak_bytes - round(low * peak_bytes), peak_bytes + round(high * peak_bytes)

    @property
    def memory_refusal(self) -> str | None:
        """Why no peak memory can be predicted; None: it can."""
        if abs(self.memory_error or 0.0) <= MAX_MEMORY_ERROR:
            return None
        return (
            "Memory cannot be predicted: the simulated peak of the recorded plan is off by "
            f"{self.memory_error:+.1%}, more than {MAX_MEMORY_ERROR:.0%}. `fsdp-inspect plan "
            "memory --help` shows how to compute it for your model without a run."
        )

    @property
    def has_several_kinds(self) -> bool:
        """Whether one kind of step does not represent the others."""
        total = self.num_steps + self.num_other_steps
        return self.num_other_steps > MAX_OTHER_RATIO * total

    @property
    def _other_kinds(self) -> str:
        total = self.num_steps + self.num_other_steps
        return f"{self.num_other_steps} of {total} typical steps run other passes or collectives"

    @property
    def prediction_caveats(self) -> tuple[str, ...]:
        """The reasons to doubt every prediction, one sentence each; every surface shows them."""
        kinds = (
            f"{self._other_kinds}. The prediction describes the most frequent kind, "
            f"{self.num_steps} steps. `fsdp-inspect simulate` predicts each kind."
        )
        spread = (
            f"The middle half of the recorded steps varies by {format_ratio(self.spread_ratio)} "
            "around its mean: the machine was busy, or the steps are unequal. Record the run again "
            "on a quiet machine before you rely on a small gain."
        )
        grows = (
            f"Each step leaves {format_bytes(self.growth_bytes_per_step or 0)} allocated, so no "
            "plan fits for long: find what keeps the memory first."
        )
        order = (
            "The ranks issued different collectives, so results of this run may be wrong, and no "
            "prediction describes a right step: `fsdp-inspect diagnose` names the first difference."
        )
        found = (
            order if self.has_other_order else None,
            grows if self.growth_bytes_per_step else None,
            self._changes_caveat,
            kinds if self.has_several_kinds else None,
            spread if self.spread_ratio >= MAX_SPREAD_RATIO else None,
            PIPELINE_CAVEAT if self.is_pipeline else None,
            self._host_caveat,
            self._cores_caveat,
            self.caveat_beside_cores,
        )
        return tuple(each for each in found if each is not None)

    @property
    def _changes_caveat(self) -> str | None:
        if not self.step_changes:
            return None
        most = max(self.step_changes, key=lambda each: abs(each.change_ratio))
        return (
            f"The step time changes within the recording. {most.sentence} A prediction does "
            "not tell steps before from steps after it. `fsdp-inspect diagnose` shows what changed."
        )

    @property
    def _host_caveat(self) -> str | None:
        if self.host_behind_ratio < HOST_CAVEAT_RATIO:
            return None
        return (
            f"The GPU may lack work for {format_ratio(self.host_behind_ratio)} of the step: the "
            "host is not ahead of it. The host's time under another plan is inferred, so every "
            "interval is wider. Run the plan before you trust its gain."
        )

    @property
    def _host_margin(self) -> float:
        """The error of a step's time because the host's work under another plan is inferred."""
        return HOST_PLAN_RATIO * self.host_behind_ratio

    def step_range_ns(
        self,
        step_ns: int,
        ends_ns: Sequence[int],
        *,
        replayed_ns: int,
        exposed_ns: int,
        is_regrouped: bool = False,
    ) -> tuple[int, int]:
        """The interval of the step of a new run.

        Args:
            step_ns: The simulated step of the plan.
            ends_ns: The same with the fastest and the slowest messages that the run allows.
            replayed_ns: The simulated step of the recorded plan.
            exposed_ns: The exposed time of the plan, which no network reduces below 0.
            is_regrouped: Whether the plan has other units than the run.

        Source:
            Each margin is the root of the sum of squares of independent errors: those of the gain,
            and what two runs differ by: their steps, their processes, compute of other units, and
            the time without a CPU core, which the next run may not have.
        """
        noise = math.hypot(
            self.spread_ratio,
            PROCESS_SPREAD_RATIO,
            REGROUPING_RATIO if is_regrouped else 0.0,
        )
        low, high = min(step_ns, *ends_ns), max(step_ns, *ends_ns)
        margins = []
        for end, most_ns in ((low, exposed_ns), (high, math.inf)):
            longer = max(replayed_ns, end)
            of_simulation, of_gain, _ = self._gain_errors_ns(replayed_ns - step_ns, longer)
            busy = self.run_delay_ratio * longer
            margins.append(math.hypot(of_simulation, min(of_gain, most_ns), busy, noise * end))
        return max(round(low - margins[0]), 0), round(high + margins[1])

    def calibration_margin(self, step_ns: int) -> float:
        """How far the compute of a new run may differ from that of this one, as a fraction."""
        _, high_ns = self.step_range_ns(step_ns, [step_ns], replayed_ns=step_ns, exposed_ns=0)
        return high_ns / step_ns - 1

    @property
    def self_check_margin(self) -> float:
        """The half width of an interval around a simulated time that includes the measured one.

        A fraction of the simulated time: measured = simulated / (1 + error), so the two differ by
        error / (1 + error) of the simulated one.
        """
        error = self.self_check_error
        return abs(error / (1 + error)) if error > -1 else 1.0

    def busy_ns(self, step_ns: int) -> float:
        """The time by which each gain is uncertain, because cores were missing.

        The step of a run on free cores is shorter by an unknown part of the time without a core.
        """
        return max(self.run_delay_ratio - MOST_DIFFERENCE, 0.0) * step_ns

    def gain_caveat(self, step_ns: int) -> str | None:
        """The sentence that every measured gain of the run needs; None: none.

        A measured time contains the time without a core, so a gain of it may be too large.
        """
        busy_ns = round(self.busy_ns(step_ns))
        if not busy_ns:
            return None
        return (
            f"It may be up to {format_ns(busy_ns)} less, because training threads had no CPU core "
            f"for {format_ratio(self.run_delay_ratio)} of the recording."
        )

    def gain_margin_ns(self, gain_ns: int, step_ns: int) -> float:
        """Half the width of the interval of a gain, without the network.

        Args:
            gain_ns: The gain. The recorded times behind it vary as much as the recorded steps, and
                its collectives as much as those whose latency is unknown.
            step_ns: The simulated step of the recorded plan.
        """
        return sum(self._gain_errors_ns(gain_ns, step_ns))

    def _gain_errors_ns(self, gain_ns: int, step_ns: int) -> tuple[float, float, float]:
        """The errors of a gain: of the simulation, of recorded times, and of missing cores."""
        return (
            (self.self_check_margin + self._host_margin) * step_ns,
            (self.spread_ratio + self.network_ratio) * abs(gain_ns),
            self.busy_ns(step_ns),
        )


def measure_trust(run: RunSource) -> Trust:
    """Collect the evidence of a run: the cores of a few ranks of each host, and missing ranks."""
    return remember(run, "trust", partial(_measure_trust, run))


def _measure_trust(run: RunSource) -> Trust:
    manifest, here = run.manifest, {record.rank for record in run.ranks}
    is_whole = manifest.source == "emulated"
    everyone = () if is_whole or not here else range(manifest.world_size)
    member = inspected_rank(run)
    is_typical = np.isin(member.steps, member.typical_steps) if member else np.zeros(0, np.bool_)
    times = member.step_time_ns[is_typical].tolist() if member else []
    growth, drift = find_growth(run), measure_drift(run)
    return Trust(
        run_id=manifest.run_id,
        run_delay=find_run_delay(run, _few_ranks(run)),
        paging=_find_paging(run, _few_ranks(run)),
        growth_bytes_per_step=growth.growth_bytes_per_step if growth else None,
        missing_ranks=tuple(rank for rank in everyone if rank not in here),
        spread_ratio=half_range_ratio(times),
        num_steps=len(times),
        host_behind_ratio=_measure_host_behind(run),
        other_plain_steps=measure_other_plain_steps(run),
        has_other_order=any(
            run.black_box(rank, at_desync=True) is not None for rank in _few_ranks(run)
        ),
        long_steps=drift.long_steps,
        step_changes=drift.changes,
    )


def _measure_host_behind(run: RunSource) -> float:
    if run.manifest.device_type == "cpu" or run.manifest.source == "imported":
        return 0.0
    step = measure_breakdown(run).headline
    return step.host_behind_ns / step.step_time_ns if step and step.step_time_ns else 0.0


def _few_ranks(run: RunSource) -> list[int]:
    """A few ranks of each host, so that large jobs read few files."""
    by_host: dict[str, list[int]] = {}
    for record in run.ranks:
        by_host.setdefault(record.host, []).append(record.rank)
    most = max(1, _MOST_RANKS // max(len(by_host), 1))
    chosen = [rank for ranks in by_host.values() for rank in ranks[:most]]
    return chosen[:_MOST_RANKS]


def find_run_delay(run: RunSource, ranks: Sequence[int]) -> RunDelay | None:
    """The rank that waits longest for a core; None if no rank has samples of the scheduler."""
    ratios = {rank: _ratio_of_rank(run, rank) for rank in ranks}
    known = [RunDelay(rank, ratio) for rank, ratio in ratios.items() if ratio is not None]
    return max(known, key=lambda each: each.ratio, default=None)


def find_extra_run_delay(run: RunSource, ranks: Sequence[int]) -> tuple[RunDelay, float] | None:
    """The rank of `ranks` that waits longest for a core, and the ratio of the other ranks.

    On a machine with fewer cores than ranks, all ranks wait for cores. Only the difference can make
    a rank slower than the others.

    Returns:
        None if no rank of `ranks` has samples of the scheduler. The ratio of the other ranks is
        their median, 0 if it is unknown.
    """
    delay = find_run_delay(run, ranks)
    others = [each for each in _few_ranks(run) if each not in ranks]
    known = [ratio for each in others if (ratio := _ratio_of_rank(run, each)) is not None]
    return None if delay is None else (delay, statistics.median(known) if known else 0.0)


def _ratio_of_rank(run: RunSource, rank: int) -> float | None:
    found = _increase(run, rank, "run_delay_ns")
    return None if found is None else found[0] / found[1]


def _increase(
    run: RunSource, rank: int, counter: str, *, from_ratio: float = 0.0
) -> tuple[int, int] | None:
    """How much a counter of the device samples rose, and in which time, ns; None: unknown.

    Args:
        run: The run.
        rank: The rank.
        counter: A column of `DeviceTable` that only rises.
        from_ratio: The fraction of the samples to leave out at the beginning.
    """
    try:
        samples = run.devices(rank)
    except StoreError:
        return None
    values = getattr(samples, counter)
    known = np.flatnonzero(values != MISSING_INT)
    known = known[int(from_ratio * len(known)) :]
    if len(known) < 2:
        return None
    first, last = known[0], known[-1]
    passed = int(samples.time_ns[last] - samples.time_ns[first])
    rise = int(values[last] - values[first])
    return (rise, passed) if passed > 0 and rise >= 0 else None


def _find_paging(run: RunSource, ranks: Sequence[int]) -> Paging | None:
    """The rank that reads most pages from a disk. See [Note: pages from a disk]."""
    found: list[Paging] = []
    for rank in ranks:
        rise = _increase(run, rank, "major_faults", from_ratio=0.5)
        if rise is None or rise[1] < _LEAST_PAGING_NS:
            continue
        rate = rise[0] / rise[1] * 1e9
        if rate >= LEAST_FAULTS_PER_S:
            found.append(Paging(rank, rate, max(int(run.devices(rank).process_swap[-1]), 0)))
    return max(found, key=lambda each: each.faults_per_s, default=None)


def find_run_delay_difference(
    before: Sequence[float], after: Sequence[float]
) -> tuple[float, float] | None:
    """The typical run delays of two sides, if their times are not comparable; else None.

    Args:
        before: `RunDelay.ratio` of each run of the first side; empty counts as a quiet machine.
        after: The same for the second side; empty: unknown, so there is no difference.
    """
    if not after:
        return None
    was, now = statistics.median(before or (0.0,)), statistics.median(after)
    return (was, now) if abs(now - was) > MOST_DIFFERENCE else None
