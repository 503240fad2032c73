"""Predict the reserved memory of a run from its allocation history, with other allocator settings.

A model of CUDA's caching allocator replays the history of a forecast or of a memory snapshot. See
`fsdp_inspect.emulation.allocator`.
"""

from dataclasses import dataclass, replace

from fsdp_inspect.emulation.allocator.caching_allocator import (
    ReservedMemory,
    predict_reserved_bytes,
)
from fsdp_inspect.emulation.allocator.settings import (
    DEFAULT_SETTINGS,
    AllocatorSettings,
    InvalidSettingsError,
    parse_settings,
)
from fsdp_inspect.trace.run import RunSource

MAX_MODEL_ERROR_RATIO = 0.05
"""If the model misses the recorded peak by more, it predicts nothing for other settings."""


@dataclass(frozen=True, slots=True)
class ReservedPrediction:
    """The predicted reserved memory of one rank, bytes."""

    rank: int
    allocator_settings: str
    """The settings of the run, as in `PYTORCH_ALLOC_CONF`; empty: the defaults."""
    origin: str
    """Always `predicted`."""
    peak_reserved_bytes: int
    peak_allocated_bytes: int
    """The highest memory of blocks in use, with the allocator's rounding."""
    expandable_peak_reserved_bytes: int | None
    """The peak with expandable segments; None: unknown, not asked for, or the run has them."""
    num_steps: int
    """Steps of the history; 0: a recording."""
    num_resting: int
    """Allocations before the history, whose order is unknown."""
    recorded_peak_reserved_bytes: int | None
    """The peak that the snapshot shows; None for forecasts."""
    unknown: str
    """The reason why the peak with expandable segments is unknown; empty: it is known."""

    @property
    def saved_bytes(self) -> int | None:
        """The memory that expandable segments would save; negative: they would reserve more."""
        expandable = self.expandable_peak_reserved_bytes
        return None if expandable is None else self.peak_reserved_bytes - expandable


def predict_reserved(
    run: RunSource,
    *,
    rank: int,
    settings: AllocatorSettings | None = None,
    compares_expandable: bool = True,
) -> ReservedPrediction | None:
    """Predict the reserved memory of one rank.

    Args:
        run: A forecast, or an imported memory snapshot.
        rank: The rank.
        settings: Allocator settings; default: those of the run.
        compares_expandable: Also predict the peak with expandable segments.

    Returns:
        None if the run has no allocation history of the rank.
    """
    history = run.allocations(rank)
    if history is None or len(history) == 0:
        return None
    unknown = ""
    if settings is None:
        settings, unknown = _settings_of(run)
    own = predict_reserved_bytes(history, settings)
    recorded = _recorded_peak(run, rank) if history.num_steps == 0 else None
    unknown = unknown or _doubt(own, recorded, history.num_resting)
    expandable = None
    if compares_expandable and not unknown and not settings.expandable_segments:
        other = replace(settings, expandable_segments=True)
        expandable = predict_reserved_bytes(history, other).peak_reserved_bytes
    return ReservedPrediction(
        rank=rank,
        allocator_settings=settings.text,
        origin="predicted",
        peak_reserved_bytes=own.peak_reserved_bytes,
        peak_allocated_bytes=own.peak_allocated_bytes,
        expandable_peak_reserved_bytes=expandable,
        num_steps=history.num_steps,
        num_resting=history.num_resting if history.num_steps == 0 else 0,
        recorded_peak_reserved_bytes=recorded,
        unknown=unknown,
    )


def _settings_of(run: RunSource) -> tuple[AllocatorSettings, str]:
    """The settings of an imported run, and why the model does not know them."""
    text = run.manifest.environment.get("PYTORCH_CUDA_ALLOC_CONF", "")
    try:
        settings = parse_settings(text)
    except InvalidSettingsError as error:
        return DEFAULT_SETTINGS, str(error)
    stated = run.manifest.recorder.get("allocator_settings") or {}
    if isinstance(stated, dict) and stated.get("expandable_segments") == "True":
        settings = replace(settings, expandable_segments=True)
    return settings, ""


def _recorded_peak(run: RunSource, rank: int) -> int | None:
    memory = run.memory(rank)
    peak = max(int(memory.peak_reserved.max(initial=-1)), int(memory.reserved.max(initial=-1)))
    return peak if peak > 0 else None


def _doubt(own: ReservedMemory, recorded: int | None, num_resting: int) -> str:
    if recorded is None:
        return ""
    error = own.peak_reserved_bytes / recorded - 1
    if abs(error) <= MAX_MODEL_ERROR_RATIO:
        return ""
    reason = (
        f"The trace does not show how the {num_resting:,} blocks before it were allocated."
        if num_resting
        else "The reason is unknown."
    )
    return f"The model of the allocator differs from the snapshot by {error:+.0%}. {reason}"
