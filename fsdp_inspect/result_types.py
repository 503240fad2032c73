"""Export the classes of all results and of the records of a run.

Code that takes or returns results imports their types from here:

    from fsdp_inspect.result_types import Summary, UnitCost

Each class loads on first use, so that the import costs nothing else and never imports torch. The
imports below are the only list: type checkers read them, and `_find_homes` does at run time.
"""

import ast
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp_inspect.advice.advise import (
        Advice as Advice,
        ParetoPoint as ParetoPoint,
        PlanAdvice as PlanAdvice,
    )
    from fsdp_inspect.advice.code_change import CodeChange as CodeChange
    from fsdp_inspect.advice.evidence import Finding as Finding
    from fsdp_inspect.advice.prediction_creation import PredictionOrigin as PredictionOrigin
    from fsdp_inspect.advice.request import AdviceRequest as AdviceRequest
    from fsdp_inspect.advice.suggestions import Proposal as Proposal, Suggestion as Suggestion
    from fsdp_inspect.analysis.bandwidth import Bandwidth as Bandwidth
    from fsdp_inspect.analysis.breakdown import StepBreakdown as StepBreakdown
    from fsdp_inspect.analysis.breakdown_causes import BreakdownCauses as BreakdownCauses
    from fsdp_inspect.analysis.clocks.alignment import (
        Alignment as Alignment,
        RankClock as RankClock,
    )
    from fsdp_inspect.analysis.clocks.clock_fit import LinearClock as LinearClock
    from fsdp_inspect.analysis.correctness import Correctness as Correctness
    from fsdp_inspect.analysis.exposed import Exposed as Exposed, ExposedOwner as ExposedOwner
    from fsdp_inspect.analysis.host_stops import (
        HostStopCost as HostStopCost,
        HostStops as HostStops,
    )
    from fsdp_inspect.analysis.kernels import KernelCost as KernelCost, Kernels as Kernels
    from fsdp_inspect.analysis.link_fit import LinkFit as LinkFit
    from fsdp_inspect.analysis.live.feed import LiveState as LiveState, LiveStatus as LiveStatus
    from fsdp_inspect.analysis.live.view import (
        DeviceSeries as DeviceSeries,
        LiveMemory as LiveMemory,
        LiveStep as LiveStep,
    )
    from fsdp_inspect.analysis.memory.allocator import AllocatorUse as AllocatorUse
    from fsdp_inspect.analysis.memory.growth import MemoryGrowth as MemoryGrowth
    from fsdp_inspect.analysis.memory.instant import LiveInstant as LiveInstant, LiveRow as LiveRow
    from fsdp_inspect.analysis.memory.overview import MemoryOverview as MemoryOverview
    from fsdp_inspect.analysis.memory.peak import (
        CategoryBytes as CategoryBytes,
        Memory as Memory,
        MemoryOfStep as MemoryOfStep,
        OwnerBytes as OwnerBytes,
        PeakMoment as PeakMoment,
        PositionBytes as PositionBytes,
        RankMemory as RankMemory,
    )
    from fsdp_inspect.analysis.memory.step import (
        Composition as Composition,
        PlaceSpan as PlaceSpan,
        StepMemory as StepMemory,
    )
    from fsdp_inspect.analysis.mesh_grid import MeshGrid as MeshGrid
    from fsdp_inspect.analysis.numerics import (
        NonFinite as NonFinite,
        Numerics as Numerics,
        UnitNumerics as UnitNumerics,
    )
    from fsdp_inspect.analysis.plan_check.check import PlanCheck as PlanCheck
    from fsdp_inspect.analysis.prefetch import UnitPrefetch as UnitPrefetch
    from fsdp_inspect.analysis.rank_grid import RankGrid as RankGrid
    from fsdp_inspect.analysis.rank_waits import RankWaits as RankWaits
    from fsdp_inspect.analysis.run_heading import RunHeading as RunHeading
    from fsdp_inspect.analysis.run_list import RunKeyNumbers as RunKeyNumbers
    from fsdp_inspect.analysis.scalars import ScalarSeries as ScalarSeries
    from fsdp_inspect.analysis.step_times import StepPoint as StepPoint, StepTimes as StepTimes
    from fsdp_inspect.analysis.step_waits import EventFacts as EventFacts
    from fsdp_inspect.analysis.stragglers.dimension_waits import DimensionWait as DimensionWait
    from fsdp_inspect.analysis.stragglers.ranks import (
        CollectiveSkew as CollectiveSkew,
        RankRow as RankRow,
        Ranks as Ranks,
    )
    from fsdp_inspect.analysis.summary import Summary as Summary
    from fsdp_inspect.analysis.throughput import Throughput as Throughput
    from fsdp_inspect.analysis.unit_history import (
        CollectiveHistory as CollectiveHistory,
        Hold as Hold,
        OneCollective as OneCollective,
        UnitHistory as UnitHistory,
    )
    from fsdp_inspect.analysis.units import (
        UnitCollective as UnitCollective,
        UnitCost as UnitCost,
        UnitCosts as UnitCosts,
    )
    from fsdp_inspect.analysis.verdict import (
        Limit as Limit,
        RankVerdict as RankVerdict,
        Verdict as Verdict,
    )
    from fsdp_inspect.analysis.wait_causes import Cause as Cause
    from fsdp_inspect.comparison.comparison import Comparison as Comparison, Side as Side
    from fsdp_inspect.comparison.differences import (
        CategoryComparison as CategoryComparison,
        KernelComparison as KernelComparison,
        MetricComparison as MetricComparison,
        PartComparison as PartComparison,
        UnitChange as UnitChange,
        UnitMeasure as UnitMeasure,
        UnitSide as UnitSide,
    )
    from fsdp_inspect.comparison.gate.check import CheckResult as CheckResult
    from fsdp_inspect.comparison.settings import (
        SettingDifference as SettingDifference,
        SharedSetting as SharedSetting,
    )
    from fsdp_inspect.comparison.verification.verification import Verification as Verification
    from fsdp_inspect.diagnosis.collective_grid import (
        CellState as CellState,
        CollectiveGrid as CollectiveGrid,
    )
    from fsdp_inspect.diagnosis.diagnose import Diagnosis as Diagnosis
    from fsdp_inspect.diagnosis.stack_groups import StackGroup as StackGroup
    from fsdp_inspect.simulation.buckets import BucketSimulation as BucketSimulation
    from fsdp_inspect.simulation.changes import Changes as Changes
    from fsdp_inspect.simulation.memory import Held as Held
    from fsdp_inspect.simulation.network import NodeLink as NodeLink
    from fsdp_inspect.simulation.predictions.ledger import VerifiedPrediction as VerifiedPrediction
    from fsdp_inspect.simulation.predictions.records import Prediction as Prediction
    from fsdp_inspect.simulation.recorded import RecordedWork as RecordedWork
    from fsdp_inspect.simulation.simulate import (
        SimulatedPlan as SimulatedPlan,
        Simulation as Simulation,
    )
    from fsdp_inspect.store.folder import RunEntry as RunEntry
    from fsdp_inspect.store.reduction.timed_steps import StepSelection as StepSelection
    from fsdp_inspect.trace.plan import Checkpointing as Checkpointing, Plan as Plan
    from fsdp_inspect.trace.run import (
        RankRecord as RankRecord,
        RunManifest as RunManifest,
        RunSource as RunSource,
        RunStatus as RunStatus,
        Unit as Unit,
    )


@cache
def _find_homes() -> dict[str, str]:
    """The module of each class, from the imports of this file."""
    parsed = ast.parse(Path(__file__).read_text(encoding="utf-8"))
    (block,) = (each for each in parsed.body if isinstance(each, ast.If))
    return {
        name.name: each.module
        for each in block.body
        if isinstance(each, ast.ImportFrom) and each.module
        for name in each.names
    }


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return __dir__()
    home = None if name.startswith("_") else _find_homes().get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(_find_homes())
