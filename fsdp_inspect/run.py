"""Open a run and analyse it; each method of `Run` returns a result object.

The commands, the dashboard, the reports and notebooks use `Run`. Its methods call the analyses, the
simulator and the advisor. Their results have the numbers as attributes, and the conversions of
`fsdp_inspect.results` (`to_dict`, `to_pandas`, `to_arrow`, `plot`).

    import fsdp_inspect as fi

    run = fi.open_run("runs/llama-1b")
    run.summary().verdict.sentence
    run.exposed(unit="layers.3").to_pandas()

Times are integers in nanoseconds and end in `_ns`, sizes are bytes and end in `_bytes`, ratios are
between 0 and 1. Times are those of the typical step unless a name says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fsdp_inspect.analysis.context import RunContext
from fsdp_inspect.analysis.step_selection import select_steps, timed_ranks
from fsdp_inspect.store.reduction.timed_steps import StepSelection
from fsdp_inspect.trace.run import RankRecord, RunManifest, RunSource, RunStatus

if TYPE_CHECKING:
    from fsdp_inspect.advice.advise import Advice
    from fsdp_inspect.advice.migration import Migration
    from fsdp_inspect.analysis.breakdown_causes import BreakdownCauses
    from fsdp_inspect.analysis.correctness import Correctness
    from fsdp_inspect.analysis.drift import Drift
    from fsdp_inspect.analysis.host_stops import HostStops
    from fsdp_inspect.analysis.kernels import Kernels
    from fsdp_inspect.analysis.lifetime import Lifetime
    from fsdp_inspect.analysis.memory.overview import MemoryOverview
    from fsdp_inspect.analysis.mesh_grid import MeshGrid
    from fsdp_inspect.analysis.nccl_times import NcclTimes
    from fsdp_inspect.analysis.numerics import Numerics
    from fsdp_inspect.analysis.rank_waits import RankWaits
    from fsdp_inspect.analysis.scalars import ScalarSeries
    from fsdp_inspect.analysis.step_times import StepTimes
    from fsdp_inspect.analysis.stragglers.ranks import Ranks
    from fsdp_inspect.analysis.summary import Summary
    from fsdp_inspect.analysis.unit_history import UnitHistory
    from fsdp_inspect.analysis.units import UnitCosts
    from fsdp_inspect.comparison.comparison import Comparison
    from fsdp_inspect.comparison.gate.check import CheckResult
    from fsdp_inspect.comparison.verification.verification import Verification
    from fsdp_inspect.diagnosis.diagnose import Diagnosis
    from fsdp_inspect.simulation.buckets import BucketSimulation
    from fsdp_inspect.simulation.network import NodeLink
    from fsdp_inspect.simulation.predictions.records import Prediction
    from fsdp_inspect.simulation.simulate import Simulation
    from fsdp_inspect.trace.plan import Plan

T = TypeVar("T")


class Run:
    """One recorded, emulated or imported run.

    A result is computed at the first call and cached. A live run shows the data that it had when it
    was opened; open it again to see newer data.
    """

    def __init__(self, source: RunSource) -> None:
        """Wrap a source. Use `open_run` for a folder."""
        self._context = RunContext.of(source)

    def __repr__(self) -> str:
        num_ranks = len(self.ranks_recorded)
        return f"<Run {self.id!r}: {self.status.value}, {num_ranks} of {self.world_size} ranks>"

    # --- properties of the run

    @property
    def source(self) -> RunContext:
        """The tables behind the results: a `RunSource` that all analyses share."""
        return self._context

    @property
    def id(self) -> str:
        """The name of the run folder."""
        return self.manifest.run_id

    @property
    def manifest(self) -> RunManifest:
        """Configuration, model, units, mesh, versions and environment of the run."""
        return self._context.manifest

    @property
    def status(self) -> RunStatus:
        """The state of the run: how it ended, or that it still runs."""
        return self._context.status

    @property
    def notes(self) -> Sequence[str]:
        """Missing or unusual data, one sentence each; empty for a complete run."""
        return self._context.notes

    @property
    def world_size(self) -> int:
        """The number of ranks of the training."""
        return self.manifest.world_size

    @property
    def ranks_recorded(self) -> Sequence[RankRecord]:
        """The ranks whose files are present, by rank."""
        return self._context.ranks

    # --- the shared context

    @cached_property
    def steps(self) -> StepSelection:
        """The finished steps, and which of them are timed, warm-up or memory steps."""
        return select_steps(self._context)

    @cached_property
    def median_rank(self) -> int | None:
        """The rank whose times are used by default; None without a timed step."""
        median = timed_ranks(self._context).median
        return None if median is None else median.rank

    @cached_property
    def unit_names(self) -> tuple[str, ...]:
        """The names of the FSDP units by index; the root is `(root)`."""
        from fsdp_inspect.formatting import format_unit

        return tuple(format_unit(unit.fqn) for unit in self.manifest.units)

    @cached_property
    def plan(self) -> Plan:
        """The plan that the recorder observed on the model.

        Raises:
            MissingDataError: The run has no plan; imported traces have none.
        """
        from fsdp_inspect.simulation.recorded import observed_plan

        return observed_plan(self._context)

    # --- analyses of the run

    def summary(self) -> Summary:
        """The limit of the step, its parts, its memory, and what to try next."""
        from fsdp_inspect.analysis.summary import measure_summary

        return self._ask("summary", lambda: measure_summary(self._context))

    def breakdown(self, *, rank: int | None = None, step: int | None = None) -> BreakdownCauses:
        """The parts of a step, which add up to it, and the causes of its exposed waits.

        Args:
            rank: Default the median rank.
            step: One finished step, timed or not; default the typical step.

        Raises:
            IncompleteRunError: The run has no data of that rank, or the rank did not finish the
                step.
        """
        from fsdp_inspect.analysis.breakdown_causes import measure_breakdown_causes

        return self._ask(
            ("breakdown", rank, step),
            lambda: measure_breakdown_causes(self._context, rank=rank, step=step),
        )

    def exposed(self, *, unit: str | None = None, rank: int | None = None) -> RankWaits:
        """The exposed communication by unit, collective, phase and cause, with evidence.

        Args:
            unit: Only waits of this unit; `(root)` is the root.
            rank: Default the median rank.

        Raises:
            IncompleteRunError: The run has no data of that rank.
            MissingDataError: The run has no unit with that name.
        """
        from fsdp_inspect.analysis.rank_waits import measure_rank_waits

        return self._ask(
            ("exposed", unit, rank),
            lambda: measure_rank_waits(self._context, rank=rank, unit=unit),
        )

    def units(self, *, rank: int | None = None) -> UnitCosts:
        """The cost of each FSDP unit in the typical step: collectives, copies, compute.

        Args:
            rank: Default the median rank.

        Raises:
            IncompleteRunError: The run has no data of that rank.
        """
        from fsdp_inspect.analysis.units import measure_units

        return self._ask(("units", rank), lambda: measure_units(self._context, rank=rank))

    def kernels(self, *, rank: int | None = None) -> Kernels:
        """The kernels of profiled steps by unit, phase and kind (CPU: operators).

        Args:
            rank: Default the median rank, or the lowest rank with a profile.

        Raises:
            ImportingError: The trace of the profiled steps is damaged.
            MissingDataError: The rank has no profiled steps.
        """
        from fsdp_inspect.analysis.kernels import measure_kernels

        return self._ask(("kernels", rank), lambda: measure_kernels(self._context, rank=rank))

    def nccl(self, logs: str | Path, *, rank: int | None = None) -> NcclTimes:
        """NCCL's own times by unit and by communicator, from JSON logs of NCCL Inspector.

        Args:
            logs: A log, or a folder with the logs of this training.
            rank: Default all ranks that have a log.

        Raises:
            ImportingError: No log can be read.
            IncompleteRunError: The run has no data of that rank.
            MissingDataError: No log belongs to a rank of the run.
        """
        from fsdp_inspect.analysis.nccl_times import measure_nccl
        from fsdp_inspect.importing.nccl_inspector import read_logs

        found, faults = read_logs(Path(logs))
        return measure_nccl(self._context, found, rank=rank, notes=faults)

    def host_stops(self) -> HostStops | None:
        """Reads of values, garbage collections and compilations by line; None: not recorded."""
        from fsdp_inspect.analysis.host_stops import measure_host_stops

        return self._ask("host stops", lambda: measure_host_stops(self._context))

    def unit_history(self, unit: str, *, rank: int | None = None) -> UnitHistory | None:
        """Every collective of one unit over the timed steps; None without a timed step.

        Args:
            unit: Name of the unit; `(root)` is the root.
            rank: Default the median rank.

        Raises:
            IncompleteRunError: The run has no data of that rank.
            MissingDataError: The run has no unit with that name.
        """
        from fsdp_inspect.analysis.unit_history import measure_unit_history
        from fsdp_inspect.analysis.units import find_unit

        index = find_unit(self.manifest, unit).index
        return self._ask(
            ("unit history", index, rank),
            lambda: measure_unit_history(self._context, unit=index, rank=rank),
        )

    def memory(self, *, rank: int | None = None) -> MemoryOverview:
        """The peak by unit, phase and category, the limit of the device, and growth.

        Args:
            rank: Default the rank with the highest peak.

        Raises:
            IncompleteRunError: The run has no data of that rank.
        """
        from fsdp_inspect.analysis.memory.overview import measure_memory_overview

        return self._ask(
            ("memory", rank), lambda: measure_memory_overview(self._context, rank=rank)
        )

    def ranks(self) -> Ranks:
        """The times and the lateness of each rank, and the straggler with its cost, if any."""
        from fsdp_inspect.analysis.stragglers.ranks import measure_ranks

        return self._ask("ranks", lambda: measure_ranks(self._context))

    def mesh_grid(
        self, *, metric: str = "own_work_ns", rows: str | None = None, columns: str | None = None
    ) -> MeshGrid:
        """The ranks laid out by two dimensions of the mesh, and the ranks that stand out.

        Args:
            metric: One of `analysis.mesh_grid.MESH_METRICS`.
            rows: A dimension such as `pp`, `node` or `local rank`; default the outermost one.
            columns: Another dimension; default the next one.

        Raises:
            ValueError: The metric or a dimension is unsupported.
        """
        from fsdp_inspect.analysis.mesh_grid import measure_mesh_grid

        return measure_mesh_grid(
            self._context, self.ranks().ranks, metric=metric, rows=rows, columns=columns
        )

    def step_times(self) -> StepTimes:
        """The step time over all finished steps of the median rank, and its spread."""
        from fsdp_inspect.analysis.step_times import measure_step_times

        return self._ask("step times", lambda: measure_step_times(self._context))

    def drift(self) -> Drift:
        """The steps at which the step time changes, and the other changes at the same steps."""
        from fsdp_inspect.analysis.drift import measure_drift

        return measure_drift(self._context)

    def lifetime(self, *, rank: int | None = None) -> Lifetime:
        """The wall time of the run by phase, over all attempts, and its goodput.

        Args:
            rank: Default the lowest recorded rank.

        Raises:
            IncompleteRunError: The run has no data of that rank.
            MissingDataError: The run is imported: a trace does not show its processes.
        """
        from fsdp_inspect.analysis.lifetime import measure_lifetime

        return measure_lifetime(self._context, rank=rank)

    def scalars(self) -> Mapping[str, ScalarSeries]:
        """The numbers that the training loop logged, by name; empty if it logged none."""
        from fsdp_inspect.analysis.scalars import measure_scalars

        return self._ask(
            "scalars", lambda: {series.name: series for series in measure_scalars(self._context)}
        )

    def numerics(self) -> Numerics | None:
        """Norms, values that are not finite, and lost updates; None without numerics steps."""
        from fsdp_inspect.analysis.numerics import measure_numerics

        return self._ask("numerics", lambda: measure_numerics(self._context))

    def migration(self) -> Migration:
        """The effects of moving a run from FSDP1 to FSDP2: settings, all-gathers, memory.

        Raises:
            MissingDataError: The run was not recorded with FSDP1.
        """
        from fsdp_inspect.advice.migration import plan_migration

        return plan_migration(self._context)

    def correctness(self) -> Correctness:
        """Mistakes of the training itself: optimizer, batches and loss of the first steps."""
        from fsdp_inspect.analysis.correctness import check_training

        return self._ask("correctness", lambda: check_training(self._context))

    def diagnose(self, *, with_plans: bool = True) -> Diagnosis:
        """The reason why the run hung, died or failed, with evidence; or that it is healthy.

        Args:
            with_plans: After an out-of-memory, also search for plans that would have fitted. This
                takes seconds.
        """
        from fsdp_inspect.diagnosis import diagnose

        found = self._ask("diagnosis", lambda: diagnose.diagnose(self._context))
        if not with_plans:
            return found
        return self._ask("diagnosis with plans", lambda: diagnose.with_plans(found, self._context))

    # --- other runs, other plans

    def compare(self, *others: Run | Sequence[Run]) -> Comparison:
        """Compare with other runs: settings, then times judged against noise, then memory.

        Args:
            others: Runs, or lists of runs that repeat one another. This run is the reference.

        Raises:
            ValueError: No other run is given.
        """
        from fsdp_inspect.comparison.comparison import compare_runs

        if not others:
            raise ValueError(
                "compare() got no run. Expected at least one other run to compare with."
            )
        sides = [each.source if isinstance(each, Run) else [run.source for run in each]
                 for each in others]  # fmt: skip
        return compare_runs(self._context, *sides)

    def simulate(
        self,
        plan: Plan | None = None,
        *,
        bandwidth: float | None = None,
        latency_ns: float | None = None,
        node: NodeLink | None = None,
        rank: int | None = None,
        **changes: Any,
    ) -> Simulation:
        """Predict the step time and the peak memory under another plan or on another network.

        Args:
            plan: The plan to simulate; default the recorded one.
            bandwidth: Bus bandwidth of the network in bytes per second; default the run's own.
            latency_ns: Latency of the network in ns; default the run's own.
            node: The link within a node; default as measured in the run.
            rank: The rank whose work is simulated; default the median rank.
            changes: Changes of the plan by name, such as `wrap="every:2"`, `forward_prefetch=2`,
                `reshard_after_forward=False` or `world_size=16`: the fields of
                `simulation.changes.Changes`.

        Raises:
            MissingDataError: The run lacks data for a simulation. The message names it.
            PlanError: The plan does not fit the model.
            TypeError: A change is unknown.
            ValueError: The network is invalid.
        """
        from fsdp_inspect.simulation.changes import Changes, apply_changes
        from fsdp_inspect.simulation.scenario import resolve_plan, shapes_of
        from fsdp_inspect.simulation.simulate import simulate_plan

        asked = Changes(**changes)
        start = resolve_plan(self.plan if plan is None else plan, self.manifest)
        wanted = apply_changes(start, asked, shapes_of(self.manifest))
        return simulate_plan(
            self._context,
            wanted,
            rank=rank,
            bus_bytes_per_s=bandwidth,
            latency_ns=latency_ns,
            node=node,
        )

    def simulate_buckets(
        self,
        bucket_cap_mb: float | None = None,
        *,
        bandwidth: float | None = None,
        latency_ns: float | None = None,
        rank: int | None = None,
        **changes: Any,
    ) -> BucketSimulation:
        """Predict the step time of DDP or ZeRO with other messages or another network.

        Args:
            bucket_cap_mb: DDP: MiB at which a bucket is full; default the recorded buckets.
            bandwidth: Bus bandwidth of the network in bytes per second; default the run's own.
            latency_ns: Latency of the network in ns; default the run's own.
            rank: The rank whose work is simulated; default the median rank.
            changes: Other settings by name, such as `overlaps=False`, `reduce_bucket_size=10**8` or
                `prefetch_bucket_size=10**7`: the fields of `simulation.buckets.BucketChanges`.

        Raises:
            MissingDataError: The run has no such buckets, or lacks data. The message says which.
            PlanError: A setting is of another sharder than the run's.
            TypeError: A change is unknown.
            ValueError: The network or the size is invalid.
        """
        from fsdp_inspect.simulation.buckets import BucketChanges, simulate_buckets

        return simulate_buckets(
            self._context,
            BucketChanges(bucket_cap_mb=bucket_cap_mb, **changes),
            bus_bytes_per_s=bandwidth,
            latency_ns=latency_ns,
            rank=rank,
        )

    def advise(
        self,
        memory_limit: int | str | None = None,
        *,
        on_progress: Callable[[int], object] = lambda _: None,
        **request: Any,
    ) -> Advice:
        """Suggest changes in order: first problems that no plan can fix, then plans by gain.

        Args:
            memory_limit: The peak must not exceed it: bytes, or text such as `"80GiB"`; default
                the memory of the device.
            on_progress: Called with the number of plans simulated so far.
            request: Further settings by name: the fields of `advice.request.AdviceRequest`.

        Raises:
            TypeError: A field is unknown.
            ValueError: The memory limit cannot be read.
        """
        from fsdp_inspect.advice.request import AdviceRequest
        from fsdp_inspect.advice.run_advice import advise_run
        from fsdp_inspect.quantities import parse_bytes

        limit = (
            parse_bytes(memory_limit, needs_unit=True)
            if isinstance(memory_limit, str)
            else memory_limit
        )
        if limit is None and memory_limit is not None:
            raise ValueError(
                f"Invalid memory limit: {memory_limit!r}. Expected bytes, or an amount with a "
                "unit such as '80GiB'."
            )
        wanted = AdviceRequest(memory_limit=limit, **{"run_name": self.id, **request})
        return advise_run(self._context, wanted, summary=self.summary(), on_progress=on_progress)

    def verify(
        self, prediction: Prediction | str | Path, *, baseline: Sequence[Run] = ()
    ) -> Verification:
        """Compare this run, which ran a predicted plan, with the prediction.

        Args:
            prediction: A prediction, or the file that `simulate` or `advise` wrote.
            baseline: Runs of the baseline's plan, recorded at about the same time as this one.

        Raises:
            PredictionError: The file is not a prediction, or it was made for another model.
        """
        from fsdp_inspect.comparison.verification.verification import verify_prediction
        from fsdp_inspect.simulation.predictions.ledger import read_prediction

        given = (
            read_prediction(Path(prediction)) if isinstance(prediction, (str, Path)) else prediction
        )
        return verify_prediction(given, [self._context], [run.source for run in baseline])

    def check(
        self, baseline: str | Path | None = None, *, budget: str | Path | None = None
    ) -> CheckResult:
        """Check the run against a baseline file, a budget file, or both, as the CI gate does.

        Raises:
            CheckError: A file is missing or invalid.
        """
        from fsdp_inspect.comparison.gate.baseline import read_baseline
        from fsdp_inspect.comparison.gate.check import check_run
        from fsdp_inspect.comparison.gate.limits import read_budget
        from fsdp_inspect.comparison.gate.measurements import read_runs

        return check_run(
            read_runs([self._context]),
            None if baseline is None else read_baseline(Path(baseline)),
            None if budget is None else read_budget(Path(budget)),
        )

    # --- reports

    def report(self) -> str:
        """Render the run as one HTML page that needs no other file."""
        from fsdp_inspect.report import html

        return html.render_run(html.read_contents(self._context))

    def _repr_html_(self) -> str:
        from html import escape

        verdict = self.summary().verdict
        table = self.breakdown()._repr_html_()
        return f"<p><b>{escape(verdict.sentence)}</b></p><p>{escape(verdict.why)}</p>{table}"

    def _ask(self, key: Hashable, compute: Callable[[], T]) -> T:
        return self._context.remember(("run", key), compute)


def open_run(path: str | Path, *, attempt: int | None = None) -> Run:
    """Open a recorded run.

    Args:
        path: The run folder, or its URL (any that fsspec can open).
        attempt: The number of the job's start; default the last one.

    Returns:
        The run, in any state; `status` and `notes` list the missing data.

    Raises:
        NotARunError: The path has no run.
        SchemaVersionError: A newer version of FSDP Inspect wrote it.
    """
    from fsdp_inspect.store.reader import open_run as open_stored

    return Run(open_stored(path, attempt=attempt))
