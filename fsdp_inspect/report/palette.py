"""Define one colour for each kind of time and each category of memory.

One colour has one meaning on all pages and in all reports. Kinds of time and categories of memory
never share a hue: at least 20 degrees of OKLCH are between any two. Grey has no hue and marks what
is not attributed. An exposed wait has the colour of its collective and is hatched, so it is visible
without colour. Charts of anything else, such as differences or ranks, use grey and the colour of
the text.

Parts and categories that are next to each other in a bar, or have one other between them, differ by
at least 20 (CIE76), and by 12 for readers with deuteranopia, protanopia or tritanopia.

All fills have a contrast of at least 3 (WCAG) with the light and the dark page, so one palette
serves both. `ink` is the colour of text on the fill, with a contrast of at least 4.5.
"""

from dataclasses import dataclass

from fsdp_inspect.trace.codes import StepPart
from fsdp_inspect.trace.host_work import STOP_NAMES

_BLACK, _WHITE = "#111418", "#FFFFFF"


@dataclass(frozen=True, slots=True)
class Look:
    """The colours and the name of one kind of time."""

    label: str
    colour: str
    ink: str
    hatched: bool = False


FORWARD = Look("forward", "#15A160", _BLACK)
BACKWARD = Look("backward", "#227E90", _WHITE)
OPTIMIZER = Look("optimizer", "#DA61BA", _BLACK)
DATA = Look("data", "#A98400", _BLACK)
ALL_GATHER = Look("all-gather", "#0081EB", _BLACK)
REDUCE_SCATTER = Look("reduce-scatter", "#C04900", _WHITE)
ALL_REDUCE = Look("all-reduce", "#C67E00", _BLACK)
OTHER_COLLECTIVE = Look("other collective", "#995591", _WHITE)
COPIES = Look("FSDP copies", "#7C675A", _WHITE)
OTHER = Look("other", "#7B8D8F", _BLACK)
KEPT = Look("kept as recorded", OTHER.colour, OTHER.ink)
"""The part of a simulated step that no plan changes."""
BETWEEN_STEPS = Look("between steps", "#987D6E", _BLACK)
EXPOSED_ALL_GATHER = Look("exposed all-gather", ALL_GATHER.colour, ALL_GATHER.ink, hatched=True)
EXPOSED_REDUCE_SCATTER = Look(
    "exposed reduce-scatter", REDUCE_SCATTER.colour, REDUCE_SCATTER.ink, hatched=True
)
EXPOSED_ALL_REDUCE = Look("exposed all-reduce", ALL_REDUCE.colour, ALL_REDUCE.ink, hatched=True)
EXPOSED_OTHER = Look(
    "exposed other collective", OTHER_COLLECTIVE.colour, OTHER_COLLECTIVE.ink, hatched=True
)
HOST_BOUND = Look("host-bound", "#6E747B", _WHITE, hatched=True)
HOST_STOP_LOOKS = {kind: Look(name, "#6E747B", _WHITE) for kind, name in STOP_NAMES.items()}
"""The looks of garbage collections, compilations, ..., which overlap the other kinds."""
EXPOSED = Look("exposed", "#76889A", _BLACK, hatched=True)
"""Waits for collectives of several kinds together."""
LATE_RANKS = Look("waits for late ranks", EXPOSED.colour, EXPOSED.ink, hatched=True)
"""The waits of a simulated step that no plan changes."""
PHASE_LOOKS = {look.label: look for look in (FORWARD, BACKWARD, OPTIMIZER, DATA)}
"""Looks of the phases of a step, by name."""
NEUTRAL = Look("", EXPOSED.colour, EXPOSED.ink)
"""Data without a kind of time or a category of memory."""
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
    "sharded_parameter": Look("sharded parameter", "#5D5FD8", _WHITE),
    "unsharded_parameter": Look("unsharded parameter", "#7F85E6", _BLACK),
    "sharded_gradient": Look("sharded gradient", "#B94257", _WHITE),
    "unsharded_gradient": Look("unsharded gradient", "#F35763", _BLACK),
    "optimizer_state": Look("optimizer state", "#8B58AC", _WHITE),
    "activation": Look("activation", "#689408", _BLACK),
    "all_gather_buffer": Look("all-gather buffer", "#867CAD", _BLACK),
    "reduce_scatter_buffer": Look("reduce-scatter buffer", "#8F7D6C", _BLACK),
    "buffer": Look("buffer", "#3F7472", _WHITE),
    "input": Look("input or kept", "#229F93", _BLACK),
    "temporary": Look("temporary", "#6773AA", _WHITE),
    "outside_allocator": Look("outside allocator", "#716C56", _WHITE),
    "unattributed": Look("unattributed", "#868891", _BLACK),
}
"""The look of each memory category: parameters are indigo and gradients red. Unsharded ones are
lighter, and communication buffers are paler."""
KEPT_IN_GROUPS = Look("kept in smaller groups", "#6D73E5", _BLACK)
"""Parameters that a simulated step keeps sharded over fewer ranks."""
STRIPES = ("#5B6975", "#647587")
"""The units of a strip, in turn."""
SERIES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
"""Groups of runs: the colours of Okabe and Ito."""
CIVIDIS = (
    *("#00224E", "#123570", "#3B496C", "#575D6D", "#707173"),
    *("#8A8678", "#A59C74", "#C3B369", "#E1CC55", "#FEE838"),
)
"""Ten colours of a map, from low to high, which are readable with colour blindness."""
DARK, LIGHT = _BLACK, _WHITE
"""Text on a colour of a map."""
