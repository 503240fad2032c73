"""Define one colour-blind-safe look for each kind of time and memory.

Charts and the timeline use the eight colours of Okabe and Ito, in light and dark mode. An exposed
wait has the colour of its collective and is hatched, so it is visible without colour. `ink` is the
colour of text on the fill, with a contrast of at least 4.5 (WCAG AA).
"""

from dataclasses import dataclass

from fsdp_inspect.trace.codes import StepPart

_BLACK, _WHITE = "#111418", "#FFFFFF"


@dataclass(frozen=True, slots=True)
class Look:
    """The colours and the name of one kind of time."""

    label: str
    colour: str
    ink: str
    hatched: bool = False


FORWARD = Look("forward", "#009E73", _BLACK)
BACKWARD = Look("backward", "#56B4E9", _BLACK)
OPTIMIZER = Look("optimizer", "#CC79A7", _BLACK)
DATA = Look("data", "#F0E442", _BLACK)
ALL_GATHER = Look("all-gather", "#0072B2", _WHITE)
REDUCE_SCATTER = Look("reduce-scatter", "#D55E00", _BLACK)
ALL_REDUCE = Look("all-reduce", "#E69F00", _BLACK)
OTHER_COLLECTIVE = Look("other collective", "#8064A9", _WHITE)
COPIES = Look("FSDP copies", "#7A8691", _BLACK)
OTHER = Look("other", "#B9C0C7", _BLACK)
BETWEEN_STEPS = Look("between steps", "#DDE1E5", _BLACK)
EXPOSED_ALL_GATHER = Look("exposed all-gather", ALL_GATHER.colour, _WHITE, hatched=True)
EXPOSED_REDUCE_SCATTER = Look("exposed reduce-scatter", REDUCE_SCATTER.colour, _BLACK, hatched=True)
EXPOSED_ALL_REDUCE = Look("exposed all-reduce", ALL_REDUCE.colour, _BLACK, hatched=True)
EXPOSED_OTHER = Look(
    "exposed other collective", OTHER_COLLECTIVE.colour, OTHER_COLLECTIVE.ink, hatched=True
)
HOST_BOUND = Look("host-bound", "#4A5560", _WHITE, hatched=True)

PART_LOOKS = {
    StepPart.FORWARD: FORWARD,
    StepPart.BACKWARD: BACKWARD,
    StepPart.FSDP_COPIES: COPIES,
    StepPart.EXPOSED_ALL_GATHER: EXPOSED_ALL_GATHER,
    StepPart.EXPOSED_REDUCE_SCATTER: EXPOSED_REDUCE_SCATTER,
    StepPart.EXPOSED_ALL_REDUCE: EXPOSED_ALL_REDUCE,
    StepPart.EXPOSED_OTHER: EXPOSED_OTHER,
    StepPart.HOST_BOUND: HOST_BOUND,
    StepPart.OPTIMIZER: OPTIMIZER,
    StepPart.DATA: DATA,
    StepPart.OTHER: OTHER,
    StepPart.BETWEEN_STEPS: BETWEEN_STEPS,
}
"""The look of each part of a step."""

_WAIT_LOOKS = {
    "all_gather": EXPOSED_ALL_GATHER,
    "reduce_scatter": EXPOSED_REDUCE_SCATTER,
    "all_reduce": EXPOSED_ALL_REDUCE,
}


def look_of_wait(kind: str, fqn: str | None) -> Look:
    """The look of a wait for a collective of that kind; all waits without a unit look the same."""
    return EXPOSED_OTHER if fqn is None else _WAIT_LOOKS.get(kind, EXPOSED_OTHER)


MEMORY_LOOKS = {
    "sharded_parameter": Look("sharded parameter", "#0072B2", _WHITE),
    "unsharded_parameter": Look("unsharded parameter", "#56B4E9", _BLACK),
    "sharded_gradient": Look("sharded gradient", "#D55E00", _BLACK),
    "unsharded_gradient": Look("unsharded gradient", "#E69F00", _BLACK),
    "optimizer_state": Look("optimizer state", "#CC79A7", _BLACK),
    "activation": Look("activation", "#009E73", _BLACK),
    "all_gather_buffer": Look("all-gather buffer", "#1F4E79", _WHITE),
    "reduce_scatter_buffer": Look("reduce-scatter buffer", "#8C3A00", _WHITE),
    "buffer": Look("buffer", "#7A8691", _BLACK),
    "input": Look("input", "#F0E442", _BLACK),
    "temporary": Look("temporary", "#8064A9", _WHITE),
    "outside_allocator": Look("outside allocator", "#4A5560", _WHITE),
    "unattributed": Look("unattributed", "#B9C0C7", _BLACK),
}
"""The look of each memory category: parameters are blue and gradients orange. Unsharded ones are
lighter, and buffers are darker."""
