"""Which colour means what? One fixed, colour-blind-safe look for each kind of time.

Okabe and Ito's eight colours, used alike by charts and timeline, in light and in dark. A wait that
is exposed has the colour of the collective that is waited for and is hatched as well, so that it
reads without colour. `ink` is the colour of text on the fill.
"""

from dataclasses import dataclass

from fsdp_inspect.trace.codes import StepPart

_BLACK, _WHITE = "#111418", "#FFFFFF"


@dataclass(frozen=True, slots=True)
class Look:
    """How one kind of time is drawn and named."""

    label: str
    colour: str
    ink: str
    hatched: bool = False


FORWARD = Look("forward", "#009E73", _WHITE)
BACKWARD = Look("backward", "#56B4E9", _BLACK)
OPTIMIZER = Look("optimizer", "#CC79A7", _BLACK)
DATA = Look("data", "#F0E442", _BLACK)
ALL_GATHER = Look("all-gather", "#0072B2", _WHITE)
REDUCE_SCATTER = Look("reduce-scatter", "#D55E00", _WHITE)
ALL_REDUCE = Look("all-reduce", "#E69F00", _BLACK)
OTHER_COLLECTIVE = Look("other collective", "#8A6FB0", _WHITE)
COPIES = Look("FSDP copies", "#7A8691", _WHITE)
OTHER = Look("other", "#B9C0C7", _BLACK)
BETWEEN_STEPS = Look("between steps", "#DDE1E5", _BLACK)
EXPOSED_ALL_GATHER = Look("exposed all-gather", ALL_GATHER.colour, _WHITE, hatched=True)
EXPOSED_REDUCE_SCATTER = Look("exposed reduce-scatter", REDUCE_SCATTER.colour, _WHITE, hatched=True)
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
"""The look of every part of a step."""

_WAIT_LOOKS = {
    "all_gather": EXPOSED_ALL_GATHER,
    "reduce_scatter": EXPOSED_REDUCE_SCATTER,
    "all_reduce": EXPOSED_ALL_REDUCE,
}


def look_of_wait(kind: str, fqn: str | None) -> Look:
    """The look of waiting for a collective of that kind; those of no unit are drawn alike."""
    return EXPOSED_OTHER if fqn is None else _WAIT_LOOKS.get(kind, EXPOSED_OTHER)


MEMORY_LOOKS = {
    "sharded_parameter": Look("sharded parameter", "#0072B2", _WHITE),
    "unsharded_parameter": Look("unsharded parameter", "#56B4E9", _BLACK),
    "sharded_gradient": Look("sharded gradient", "#D55E00", _WHITE),
    "unsharded_gradient": Look("unsharded gradient", "#E69F00", _BLACK),
    "optimizer_state": Look("optimizer state", "#CC79A7", _BLACK),
    "activation": Look("activation", "#009E73", _WHITE),
    "all_gather_buffer": Look("all-gather buffer", "#1F4E79", _WHITE),
    "reduce_scatter_buffer": Look("reduce-scatter buffer", "#8C3A00", _WHITE),
    "buffer": Look("buffer", "#7A8691", _WHITE),
    "input": Look("input", "#F0E442", _BLACK),
    "temporary": Look("temporary", "#8A6FB0", _WHITE),
    "outside_allocator": Look("outside allocator", "#4A5560", _WHITE),
    "unattributed": Look("unattributed", "#B9C0C7", _BLACK),
}
"""The look of every memory category: parameters blue, gradients orange; what FSDP makes for a
moment of either is lighter, its buffers are darker."""
