"""Check the state and the requests of the browser.

The browser sends one whole object at every change:

    key       identity of the drawing
    view      {start_ns, end_ns, width_px}: the window
    selected  number of an event; -1: none
    find      {query, direction, serial}: the search
    pinned    positions of the ranks that stay at the top
    range     {start_ns, end_ns, block}: what is summed, and the position of its rank
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from fsdp_inspect_app.timeline.lod import View
from fsdp_inspect_app.timeline.track_set import Place, SummedRange, Tracks

MAX_WIDTH_PX = 8192
_MAX_QUERY = 400
_MOST_DIGITS = 9


@dataclass(frozen=True, slots=True)
class TimelineRequest:
    """The state of a drawing; also its initial state."""

    view: View | None = None
    """The window; None: the whole drawing."""
    selected: Place | None = None
    query: str = ""
    """The text of the search."""
    direction: int = 0
    serial: int = 0
    """The number of the search, so that it is answered once."""
    pinned: tuple[tuple[int, int], ...] = ()
    """The pinned ranks, as set and rank."""
    summed: SummedRange | None = None
    """The range whose times are summed."""


@dataclass(frozen=True, slots=True)
class Jump:
    """A jump of the page to an event, which is selected and shown."""

    serial: int
    """The number of the jump, so that it is made once."""
    place: Place


def read_request(
    state: Mapping[str, Any], tracks: Tracks, *, opening: TimelineRequest
) -> TimelineRequest:
    """Read the request of the browser; invalid values are ignored.

    Args:
        state: The component's session state.
        tracks: The drawing.
        opening: The state before the first request for this drawing.
    """
    asked = state.get("asked")
    if not isinstance(asked, Mapping) or asked.get("key") != tracks.key:
        return opening
    find = asked.get("find")
    find = find if isinstance(find, Mapping) else {}
    query = find.get("query")
    return TimelineRequest(
        view=_read_view(asked.get("view"), tracks.end_ns),
        selected=_read_selected(asked.get("selected"), tracks),
        query=query[:_MAX_QUERY] if isinstance(query, str) else "",
        direction=_whole(find.get("direction"), (-1, 0, 1)),
        serial=_whole(find.get("serial"), range(1 << 31)),
        pinned=_read_pinned(asked.get("pinned"), tracks),
        summed=_read_range(asked.get("range"), tracks),
    )


def parse_view(text: str, end_ns: int, *, width_px: int = 1600) -> View | None:
    """Parse the window of a link, `START-END` in ns; None if it is invalid."""
    start, _, end = text.partition("-")
    if not (start.isdecimal() and end.isdecimal() and len(text) < 40):
        return None
    window = {"start_ns": int(start), "end_ns": int(end), "width_px": width_px}
    return _read_view(window, end_ns)


def parse_range(text: str, end_ns: int, ranks: Collection[int]) -> SummedRange | None:
    """Parse the range of a link, `RANK-START-END` in ns; None if it is invalid."""
    rank, _, rest = text.partition("-")
    view = parse_view(rest, end_ns)
    if view is None or not rank.isdecimal() or len(rank) > _MOST_DIGITS or int(rank) not in ranks:
        return None
    return SummedRange(0, int(rank), view.start_ns, view.end_ns)


def name_range(summed: SummedRange) -> str:
    """The range as a link has it, see `parse_range`."""
    return f"{summed.rank}-{summed.start_ns}-{summed.end_ns}"


def _read_range(asked: object, tracks: Tracks) -> SummedRange | None:
    if not isinstance(asked, Mapping):
        return None
    view = _read_view({**asked, "width_px": 1}, tracks.end_ns)
    blocks = tracks.blocks
    block = asked.get("block")
    if view is None or not _is_whole(block) or not 0 <= block < len(blocks):
        return None
    return SummedRange(*blocks[block], view.start_ns, view.end_ns)


def _read_view(asked: object, end_ns: int) -> View | None:
    if not isinstance(asked, Mapping):
        return None
    start, end, width = (asked.get(name) for name in ("start_ns", "end_ns", "width_px"))
    if not (_is_whole(start) and _is_whole(end) and _is_whole(width)):
        return None
    start, end = max(start, 0), min(end, end_ns)
    return View(start, end, min(max(width, 1), MAX_WIDTH_PX)) if start < end else None


def _read_selected(asked: object, tracks: Tracks) -> Place | None:
    if not isinstance(asked, int) or not 0 <= asked < tracks.num_events:
        return None
    return tracks.place(asked)


def _read_pinned(asked: object, tracks: Tracks) -> tuple[tuple[int, int], ...]:
    blocks = tracks.blocks
    if not isinstance(asked, list):
        return ()
    legal = [one for one in asked if isinstance(one, int) and 0 <= one < len(blocks)]
    return tuple(blocks[position] for position in dict.fromkeys(legal))


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _whole(value: object, legal: range | tuple[int, ...]) -> int:
    return value if isinstance(value, int) and value in legal else 0
