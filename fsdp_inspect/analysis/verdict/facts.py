"""Which numbers does a verdict rest on? Times of one step, ns; what is unknown is None or empty."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Whose communication the rank waits for most."""

    fqn: str | None
    """None: of no unit."""
    kind: str
    phase: str
    exposed_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerFacts:
    """The rank that the others wait for."""

    rank: int
    host: str
    cost_ns: int
    """By how much a step would be shorter had it kept up."""
    last_ratio: float
    """Share of the collectives at which it arrives last, 0 to 1."""
    late_ns: int
    """Where it is last: after the rank in the middle of the others."""
    phase: str
    """Where it is latest."""
    meanwhile: str
    """The part of its step that is longest against the others."""
    meanwhile_ns: int
    """By how much, per step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryGrowthFacts:
    """What is allocated at the end of a step grows from step to step."""

    rank: int
    bytes_per_step: float
    steps_until_full: int | None
    """None where the device's memory is not known (CPU)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """The numbers that a verdict rests on."""

    step_time_ns: int
    compute_ns: int
    """Forward, backward and optimizer; in a kernel trace compute of unknown phase as well."""
    data_ns: int
    host_bound_ns: int
    exposed_ns: int
    floor_ns: int
    other_ns: int
    exposed_by_kind_ns: Mapping[str, int] = field(default_factory=dict)
    """`all_gather`, `reduce_scatter`, `all_reduce`, `other`; they add up to `exposed_ns`."""
    causes_ns: Mapping[str, int] = field(default_factory=dict)
    """By cause of a wait, those above 0; empty if the causes are not known."""
    backward_gathers_ns: int = 0
    """Exposed all-gathers of the backward, which `reshard_after_forward=False` removes."""
    top: Waiting | None = None
    reduces_in_float32: bool = False
    """Some unit's gradients are reduced in float32."""
    blocks_host: bool = False
    """The backend's collectives are synchronous."""
    backend: str = ""
    is_kernel_trace: bool = False
    """Imported: it is known when kernels ran, but not who waited for whom, nor for data."""
    knows_fsdp: bool = True
    """What belongs to no unit is known not to be FSDP's."""
    has_gathers: bool = True
    """Parameters are gathered in the step: there is a sharding plan that could be changed."""
    num_units: int = 0
    largest_unit_ratio: float = 0.0
    """Share of the parameters in the largest unit."""
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    device_bytes: int | None = None
    device_ratio: float | None = None
    fragmentation_ratio: float | None = None
    """Reserved but not in use at the peak, as a share of reserved; None: not recorded."""
    num_alloc_retries: int | None = None
    straggler: StragglerFacts | None = None
    growth: MemoryGrowthFacts | None = None
    contradiction: str | None = None
    """What the run did that its plan does not say, as a sentence; None: it did what it says."""

    def ratio(self, duration_ns: int) -> float:
        """A time as a share of the step; 0 for a step of no length."""
        return duration_ns / self.step_time_ns if self.step_time_ns else 0.0

    @property
    def is_unwrapped(self) -> bool:
        """Whether one unit holds most of the model: nothing lies beside its communication."""
        return self.num_units == 1 or self.largest_unit_ratio > DOMINANT_UNIT_RATIO

    @property
    def avoidable_ns(self) -> int:
        """Exposed time that some plan could hide; in an unwrapped model all of it."""
        return self.exposed_ns if self.is_unwrapped else self.exposed_ns - self.floor_ns


DOMINANT_UNIT_RATIO = 0.50
"""Share of the parameters in one unit from which R1 applies."""
