"""Export the classes of all results and of the records of a run.

Code that takes or returns results imports their types from here:

    from fsdp_inspect.result_types import Summary, UnitCost

Each class loads on first use, so that the import costs nothing else and never imports torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp_inspect.advice.advise import Advice, ParetoPoint, PlanAdvice
    from fsdp_inspect.advice.code_change import CodeChange
    from fsdp_inspect.advice.evidence import Finding
    from fsdp_inspect.advice.prediction_creation import PredictionOrigin
    from fsdp_inspect.advice.request import AdviceRequest
    from fsdp_inspect.advice.suggestions import Proposal, Suggestion
    from fsdp_inspect.analysis.bandwidth import Bandwidth
    from fsdp_inspect.analysis.breakdown import StepBreakdown
    from fsdp_inspect.analysis.breakdown_causes import BreakdownCauses
    from fsdp_inspect.analysis.clocks.alignment import Alignment, RankClock
    from fsdp_inspect.analysis.clocks.clock_fit import LinearClock
    from fsdp_inspect.analysis.exposed import Exposed, ExposedOwner
    from fsdp_inspect.analysis.link_fit import LinkFit
    from fsdp_inspect.analysis.live.feed import LiveState, LiveStatus
    from fsdp_inspect.analysis.live.view import DeviceSeries, LiveMemory, LiveStep
    from fsdp_inspect.analysis.memory.allocator import AllocatorUse
    from fsdp_inspect.analysis.memory.growth import MemoryGrowth
    from fsdp_inspect.analysis.memory.instant import LiveInstant, LiveRow
    from fsdp_inspect.analysis.memory.overview import MemoryOverview
    from fsdp_inspect.analysis.memory.peak import (
        CategoryBytes,
        Memory,
        MemoryOfStep,
        OwnerBytes,
        PeakMoment,
        PositionBytes,
        RankMemory,
    )
    from fsdp_inspect.analysis.memory.step import Composition, PlaceSpan, StepMemory
    from fsdp_inspect.analysis.mesh_grid import MeshGrid
    from fsdp_inspect.analysis.numerics import NonFinite, Numerics, UnitNumerics
    from fsdp_inspect.analysis.plan_check.check import PlanCheck
    from fsdp_inspect.analysis.prefetch import UnitPrefetch
    from fsdp_inspect.analysis.rank_grid import RankGrid
    from fsdp_inspect.analysis.rank_waits import RankWaits
    from fsdp_inspect.analysis.run_heading import Heading, RunHeading
    from fsdp_inspect.analysis.run_list import RunKeyNumbers
    from fsdp_inspect.analysis.scalars import ScalarSeries
    from fsdp_inspect.analysis.step_times import StepPoint, StepTimes
    from fsdp_inspect.analysis.step_waits import EventFacts
    from fsdp_inspect.analysis.stragglers.dimension_waits import DimensionWait
    from fsdp_inspect.analysis.stragglers.ranks import CollectiveSkew, RankRow, Ranks
    from fsdp_inspect.analysis.summary import Summary
    from fsdp_inspect.analysis.throughput import Throughput
    from fsdp_inspect.analysis.unit_history import (
        CollectiveHistory,
        Hold,
        OneCollective,
        UnitHistory,
    )
    from fsdp_inspect.analysis.units import UnitCollective, UnitCost, UnitCosts
    from fsdp_inspect.analysis.verdict import Limit, RankVerdict, Verdict
    from fsdp_inspect.analysis.wait_causes import Cause
    from fsdp_inspect.comparison.comparison import Comparison, Side
    from fsdp_inspect.comparison.differences import (
        CategoryComparison,
        MetricComparison,
        PartComparison,
        UnitChange,
        UnitMeasure,
        UnitSide,
    )
    from fsdp_inspect.comparison.gate.check import CheckResult
    from fsdp_inspect.comparison.settings import SettingDifference, SharedSetting
    from fsdp_inspect.comparison.verification.verification import Verification
    from fsdp_inspect.diagnosis.collective_grid import CellState, CollectiveGrid
    from fsdp_inspect.diagnosis.diagnose import Diagnosis
    from fsdp_inspect.diagnosis.stack_groups import StackGroup
    from fsdp_inspect.simulation.changes import Changes
    from fsdp_inspect.simulation.memory import Held
    from fsdp_inspect.simulation.network import NodeLink
    from fsdp_inspect.simulation.predictions.ledger import VerifiedPrediction
    from fsdp_inspect.simulation.predictions.records import Prediction
    from fsdp_inspect.simulation.recorded import RecordedWork
    from fsdp_inspect.simulation.simulate import Played, Simulation
    from fsdp_inspect.store.folder import RunEntry
    from fsdp_inspect.store.reduction.timed_steps import StepSelection
    from fsdp_inspect.trace.plan import Checkpointing, Plan
    from fsdp_inspect.trace.run import RankRecord, RunManifest, RunSource, RunStatus, Unit

__all__ = [
    "Advice",
    "AdviceRequest",
    "Alignment",
    "AllocatorUse",
    "Bandwidth",
    "BreakdownCauses",
    "CategoryBytes",
    "CategoryComparison",
    "Cause",
    "CellState",
    "Changes",
    "CheckResult",
    "Checkpointing",
    "CodeChange",
    "CollectiveGrid",
    "CollectiveHistory",
    "CollectiveSkew",
    "Comparison",
    "Composition",
    "DeviceSeries",
    "Diagnosis",
    "DimensionWait",
    "EventFacts",
    "Exposed",
    "ExposedOwner",
    "Finding",
    "Heading",
    "Held",
    "Hold",
    "Limit",
    "LinearClock",
    "LinkFit",
    "LiveInstant",
    "LiveMemory",
    "LiveRow",
    "LiveState",
    "LiveStatus",
    "LiveStep",
    "Memory",
    "MemoryGrowth",
    "MemoryOfStep",
    "MemoryOverview",
    "MeshGrid",
    "MetricComparison",
    "NodeLink",
    "NonFinite",
    "Numerics",
    "OneCollective",
    "OwnerBytes",
    "ParetoPoint",
    "PartComparison",
    "PeakMoment",
    "PlaceSpan",
    "Plan",
    "PlanAdvice",
    "PlanCheck",
    "Played",
    "PositionBytes",
    "Prediction",
    "PredictionOrigin",
    "Proposal",
    "RankClock",
    "RankGrid",
    "RankMemory",
    "RankRecord",
    "RankRow",
    "RankVerdict",
    "RankWaits",
    "Ranks",
    "RecordedWork",
    "RunEntry",
    "RunHeading",
    "RunKeyNumbers",
    "RunManifest",
    "RunSource",
    "RunStatus",
    "ScalarSeries",
    "SettingDifference",
    "SharedSetting",
    "Side",
    "Simulation",
    "StackGroup",
    "StepBreakdown",
    "StepMemory",
    "StepPoint",
    "StepSelection",
    "StepTimes",
    "Suggestion",
    "Summary",
    "Throughput",
    "Unit",
    "UnitChange",
    "UnitCollective",
    "UnitCost",
    "UnitCosts",
    "UnitHistory",
    "UnitMeasure",
    "UnitNumerics",
    "UnitPrefetch",
    "UnitSide",
    "Verdict",
    "Verification",
    "VerifiedPrediction",
]

_HOMES = {
    "Advice": "fsdp_inspect.advice.advise",
    "AdviceRequest": "fsdp_inspect.advice.request",
    "Alignment": "fsdp_inspect.analysis.clocks.alignment",
    "AllocatorUse": "fsdp_inspect.analysis.memory.allocator",
    "Bandwidth": "fsdp_inspect.analysis.bandwidth",
    "BreakdownCauses": "fsdp_inspect.analysis.breakdown_causes",
    "CategoryBytes": "fsdp_inspect.analysis.memory.peak",
    "CategoryComparison": "fsdp_inspect.comparison.differences",
    "Cause": "fsdp_inspect.analysis.wait_causes",
    "CellState": "fsdp_inspect.diagnosis.collective_grid",
    "Changes": "fsdp_inspect.simulation.changes",
    "CheckResult": "fsdp_inspect.comparison.gate.check",
    "Checkpointing": "fsdp_inspect.trace.plan",
    "CodeChange": "fsdp_inspect.advice.code_change",
    "CollectiveGrid": "fsdp_inspect.diagnosis.collective_grid",
    "CollectiveHistory": "fsdp_inspect.analysis.unit_history",
    "CollectiveSkew": "fsdp_inspect.analysis.stragglers.ranks",
    "Comparison": "fsdp_inspect.comparison.comparison",
    "Composition": "fsdp_inspect.analysis.memory.step",
    "DeviceSeries": "fsdp_inspect.analysis.live.view",
    "Diagnosis": "fsdp_inspect.diagnosis.diagnose",
    "DimensionWait": "fsdp_inspect.analysis.stragglers.dimension_waits",
    "EventFacts": "fsdp_inspect.analysis.step_waits",
    "Exposed": "fsdp_inspect.analysis.exposed",
    "ExposedOwner": "fsdp_inspect.analysis.exposed",
    "Finding": "fsdp_inspect.advice.evidence",
    "Heading": "fsdp_inspect.analysis.run_heading",
    "Held": "fsdp_inspect.simulation.memory",
    "Hold": "fsdp_inspect.analysis.unit_history",
    "Limit": "fsdp_inspect.analysis.verdict",
    "LinearClock": "fsdp_inspect.analysis.clocks.clock_fit",
    "LinkFit": "fsdp_inspect.analysis.link_fit",
    "LiveMemory": "fsdp_inspect.analysis.live.view",
    "LiveState": "fsdp_inspect.analysis.live.feed",
    "LiveStatus": "fsdp_inspect.analysis.live.feed",
    "LiveRow": "fsdp_inspect.analysis.memory.instant",
    "LiveStep": "fsdp_inspect.analysis.live.view",
    "Memory": "fsdp_inspect.analysis.memory.peak",
    "MemoryGrowth": "fsdp_inspect.analysis.memory.growth",
    "LiveInstant": "fsdp_inspect.analysis.memory.instant",
    "MemoryOfStep": "fsdp_inspect.analysis.memory.peak",
    "MemoryOverview": "fsdp_inspect.analysis.memory.overview",
    "MeshGrid": "fsdp_inspect.analysis.mesh_grid",
    "MetricComparison": "fsdp_inspect.comparison.differences",
    "NodeLink": "fsdp_inspect.simulation.network",
    "NonFinite": "fsdp_inspect.analysis.numerics",
    "Numerics": "fsdp_inspect.analysis.numerics",
    "OneCollective": "fsdp_inspect.analysis.unit_history",
    "PredictionOrigin": "fsdp_inspect.advice.prediction_creation",
    "OwnerBytes": "fsdp_inspect.analysis.memory.peak",
    "ParetoPoint": "fsdp_inspect.advice.advise",
    "PartComparison": "fsdp_inspect.comparison.differences",
    "PeakMoment": "fsdp_inspect.analysis.memory.peak",
    "PlaceSpan": "fsdp_inspect.analysis.memory.step",
    "Plan": "fsdp_inspect.trace.plan",
    "PlanAdvice": "fsdp_inspect.advice.advise",
    "PlanCheck": "fsdp_inspect.analysis.plan_check.check",
    "Played": "fsdp_inspect.simulation.simulate",
    "PositionBytes": "fsdp_inspect.analysis.memory.peak",
    "Prediction": "fsdp_inspect.simulation.predictions.records",
    "Proposal": "fsdp_inspect.advice.suggestions",
    "RankClock": "fsdp_inspect.analysis.clocks.alignment",
    "RankGrid": "fsdp_inspect.analysis.rank_grid",
    "RankMemory": "fsdp_inspect.analysis.memory.peak",
    "RankRecord": "fsdp_inspect.trace.run",
    "RankRow": "fsdp_inspect.analysis.stragglers.ranks",
    "RankVerdict": "fsdp_inspect.analysis.verdict",
    "RankWaits": "fsdp_inspect.analysis.rank_waits",
    "Ranks": "fsdp_inspect.analysis.stragglers.ranks",
    "RecordedWork": "fsdp_inspect.simulation.recorded",
    "RunEntry": "fsdp_inspect.store.folder",
    "RunHeading": "fsdp_inspect.analysis.run_heading",
    "RunKeyNumbers": "fsdp_inspect.analysis.run_list",
    "RunManifest": "fsdp_inspect.trace.run",
    "RunSource": "fsdp_inspect.trace.run",
    "RunStatus": "fsdp_inspect.trace.run",
    "ScalarSeries": "fsdp_inspect.analysis.scalars",
    "SettingDifference": "fsdp_inspect.comparison.settings",
    "SharedSetting": "fsdp_inspect.comparison.settings",
    "Side": "fsdp_inspect.comparison.comparison",
    "Simulation": "fsdp_inspect.simulation.simulate",
    "StackGroup": "fsdp_inspect.diagnosis.stack_groups",
    "StepBreakdown": "fsdp_inspect.analysis.breakdown",
    "StepMemory": "fsdp_inspect.analysis.memory.step",
    "StepPoint": "fsdp_inspect.analysis.step_times",
    "StepSelection": "fsdp_inspect.store.reduction.timed_steps",
    "StepTimes": "fsdp_inspect.analysis.step_times",
    "Suggestion": "fsdp_inspect.advice.suggestions",
    "Summary": "fsdp_inspect.analysis.summary",
    "Throughput": "fsdp_inspect.analysis.throughput",
    "Unit": "fsdp_inspect.trace.run",
    "UnitChange": "fsdp_inspect.comparison.differences",
    "UnitCollective": "fsdp_inspect.analysis.units",
    "UnitCost": "fsdp_inspect.analysis.units",
    "UnitCosts": "fsdp_inspect.analysis.units",
    "UnitHistory": "fsdp_inspect.analysis.unit_history",
    "UnitMeasure": "fsdp_inspect.comparison.differences",
    "UnitNumerics": "fsdp_inspect.analysis.numerics",
    "UnitPrefetch": "fsdp_inspect.analysis.prefetch",
    "UnitSide": "fsdp_inspect.comparison.differences",
    "Verdict": "fsdp_inspect.analysis.verdict",
    "Verification": "fsdp_inspect.comparison.verification.verification",
    "VerifiedPrediction": "fsdp_inspect.simulation.predictions.ledger",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
