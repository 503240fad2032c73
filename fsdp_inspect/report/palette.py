"""Define one colour for each kind of time and each category of memory.

One colour has one meaning on all pages and in all reports. Kinds of time and categories of memory
never share a hue: at least 20 degrees of OKLCH are between any two. Grey has no hue and marks what
is not attributed. An exposed wait has the colour of its collective and is hatched, so it is visible
without colour. Charts of anything else, such as differences or ranks, use grey and the colour of
the text.

All fills have a contrast of at least 3 (WCAG) with the light and the dark page, so one palette
serves both. `ink` is the colour of text on the fill, with a contrast of at least 4.5.
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


FORWARD = Look("forward", "#079A58", _BLACK)
BACKWARD = Look("backward", "#069BA2", _BLACK)
OPTIMIZER = Look("optimizer", "#D95D9E", _BLACK)
DATA = Look("data", "#968D08", _BLACK)
ALL_GATHER = Look("all-gather", "#136FD0", _WHITE)
REDUCE_SCATTER = Look("reduce-scatter", "#D85A05", _BLACK)
ALL_REDUCE = Look("all-reduce", "#BD8001", _BLACK)
OTHER_COLLECTIVE = Look("other collective", "#805FB3", _WHITE)
COPIES = Look("FSDP copies", "#7C6859", _WHITE)
OTHER = Look("other", "#81878E", _BLACK)
BETWEEN_STEPS = Look("between steps", "#8B8E91", _BLACK)
EXPOSED_ALL_GATHER = Look("exposed all-gather", ALL_GATHER.colour, _WHITE, hatched=True)
EXPOSED_REDUCE_SCATTER = Look("exposed reduce-scatter", REDUCE_SCATTER.colour, _BLACK, hatched=True)
EXPOSED_ALL_REDUCE = Look("exposed all-reduce", ALL_REDUCE.colour, _BLACK, hatched=True)
EXPOSED_OTHER = Look(
    "exposed other collective", OTHER_COLLECTIVE.colour, OTHER_COLLECTIVE.ink, hatched=True
)
HOST_BOUND = Look("host-bound", "#5F6E7D", _WHITE, hatched=True)
EXPOSED = Look("exposed", "#76889A", _BLACK, hatched=True)
"""Waits for collectives of several kinds together."""
SHOWN = "var(--ink)"
"""The colour that marks the shown item among others: that of the text."""

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
    "sharded_parameter": Look("sharded parameter", "#6164D5", _WHITE),
    "unsharded_parameter": Look("unsharded parameter", "#7C84EA", _BLACK),
    "sharded_gradient": Look("sharded gradient", "#C74150", _WHITE),
    "unsharded_gradient": Look("unsharded gradient", "#E75E6A", _BLACK),
    "optimizer_state": Look("optimizer state", "#A153A6", _WHITE),
    "activation": Look("activation", "#679405", _BLACK),
    "all_gather_buffer": Look("all-gather buffer", "#62689B", _WHITE),
    "reduce_scatter_buffer": Look("reduce-scatter buffer", "#975B5D", _WHITE),
    "buffer": Look("buffer", "#76808A", _BLACK),
    "input": Look("input", "#099A85", _BLACK),
    "temporary": Look("temporary", "#0590BA", _BLACK),
    "outside_allocator": Look("outside allocator", "#6B7075", _WHITE),
    "unattributed": Look("unattributed", "#81878E", _BLACK),
}
"""The look of each memory category: parameters are indigo and gradients red. Unsharded ones are
lighter, and communication buffers are paler."""
