"""Parse the names of FSDP's profiler ranges to a unit and an activity.

FSDP2 names its ranges `FSDP::activity (unit)`. The root has no name, a prefetch has the name
`FSDP::forward_prefetch for unit`, and a module with several groups adds ` [pg=size]`. The set of
ranges differs between versions of torch (checked: 2.6 to 2.15), so the import depends on no single
range. FSDP1's ranges name no unit.

Source: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py and _fsdp_state.py.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

_PREFIX = "FSDP::"
_FSDP1_PREFIX = "FullyShardedDataParallel."
_LABEL = re.compile(
    r"FSDP::(?P<what>\w+)"
    r"(?: for (?P<target>.*?)| \((?P<fqn>.*)\))?"
    r"(?: \[pg=(?P<group>\d+)\])?\s*"
)


class RangeKind(Enum):
    """The activity of a range; it belongs to a unit unless stated otherwise."""

    PRE_FORWARD = "pre_forward"
    POST_FORWARD = "post_forward"
    PRE_BACKWARD = "pre_backward"
    POST_BACKWARD = "post_backward"
    """Accumulating and resharding, after the unit's own backward."""
    ALL_GATHER = "all_gather"
    COPY_OUT = "all_gather_copy_out"
    REDUCE = "post_backward_reduce"
    PREFETCH = "prefetch"
    """Contains the all-gather of the named unit, which another unit issues."""
    ROOT_FORWARD = "root_pre_forward"
    """Belongs to no unit."""
    ROOT_BACKWARD = "root_post_backward_callback"
    """Belongs to no unit."""
    OTHER = "other"


_ACTIVITIES = {
    "pre_forward": RangeKind.PRE_FORWARD,
    "post_forward": RangeKind.POST_FORWARD,
    "pre_backward": RangeKind.PRE_BACKWARD,
    "post_backward_accumulate": RangeKind.POST_BACKWARD,
    "post_backward_reshard": RangeKind.POST_BACKWARD,
    "post_backward_rs_wait": RangeKind.OTHER,
    "all_gather": RangeKind.ALL_GATHER,
    "all_gather_copy_out": RangeKind.COPY_OUT,
    "post_backward_reduce": RangeKind.REDUCE,
    "forward_prefetch": RangeKind.PREFETCH,
    "backward_prefetch": RangeKind.PREFETCH,
    "root_pre_forward": RangeKind.ROOT_FORWARD,
    "root_post_backward_callback": RangeKind.ROOT_BACKWARD,
}
_OF_NO_UNIT = frozenset({RangeKind.ROOT_FORWARD, RangeKind.ROOT_BACKWARD, RangeKind.OTHER})

_FSDP1_ACTIVITIES = {
    "_pre_forward": RangeKind.PRE_FORWARD,
    "_post_forward": RangeKind.POST_FORWARD,
    "_pre_backward_hook": RangeKind.PRE_BACKWARD,
    "_post_backward_hook": RangeKind.REDUCE,
    "_pre_forward_prefetch": RangeKind.PREFETCH,
    "_pre_backward_prefetch": RangeKind.PREFETCH,
    "_post_backward_prefetch": RangeKind.PREFETCH,
    "_root_pre_forward": RangeKind.ROOT_FORWARD,
    "_post_backward_final_callback": RangeKind.ROOT_BACKWARD,
}


@dataclass(frozen=True, slots=True)
class Label:
    """The parsed name of a range."""

    activity: RangeKind
    unit: str | None
    """The unit's fqn, empty for the root, with ` [pg=size]` if several groups share it. None for
    ranges that belong to no unit, and for FSDP1, whose ranges name no unit."""
    is_backward: bool
    is_fsdp1: bool = False


def parse_label(name: str) -> Label | None:
    """Parse the name of a range; None if it is not FSDP's.

    >>> parse_label("FSDP::all_gather (layers.0)").unit
    'layers.0'
    >>> parse_label("FSDP::backward_prefetch for ").unit
    ''
    """
    if name.startswith(_FSDP1_PREFIX):
        return _parse_fsdp1(name.removeprefix(_FSDP1_PREFIX))
    found = _LABEL.fullmatch(name) if name.startswith(_PREFIX) else None
    if found is None:
        return None
    what = found["what"]
    activity = _ACTIVITIES.get(what, RangeKind.OTHER)
    unit = None
    if activity not in _OF_NO_UNIT:
        group = f" [pg={found['group']}]" if found["group"] else ""
        unit = f"{found['target'] or found['fqn'] or ''}{group}"
    return Label(activity, unit, "backward" in what)


def parse_labels(names: Sequence[str]) -> dict[int, Label]:
    """The labels of all names of FSDP ranges, by index."""
    found = {position: parse_label(name) for position, name in enumerate(names)}
    return {position: label for position, label in found.items() if label is not None}


def _parse_fsdp1(what: str) -> Label | None:
    activity = _FSDP1_ACTIVITIES.get(what)
    if activity is None:
        return None
    return Label(activity, None, "backward" in what, is_fsdp1=True)
