"""Which colour means what? One fixed, colour-blind-safe look for each kind of time.

Okabe and Ito's eight colours, used alike by charts and timeline, in light and in dark. A wait that
is exposed has the colour of the collective that is waited for and is hatched as well, so that it
reads without colour. `ink` is the colour of text on the fill.
"""

from dataclasses import dataclass

from fsdp_inspect.trace.reduction import StepPart

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
