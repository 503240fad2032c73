"""Read and write the selection in the address: run, step, rank and unit, all validated.

An address holds names and numbers from listings, never a path. Values that are not in the listing
are ignored. The parameters, on all pages:

    run        the run that the page is about: its id below the folder
    step       one step
    rank       one rank; may repeat
    unit       a unit as it is shown: its fqn, or `(root)`
    with       a run that is compared; repeats
    baseline   the run that the others are compared with
    pin        a run that is listed first; repeats
    window     timeline: START-END, ns from the start of the step
    span       timeline: RANK-NUMBER of the selected event
    range      timeline: RANK-START-END of the summed range, ns
    top        timeline: a rank that stays at the top; repeats
    at         memory: the chosen instant, ns since the first reading of the step
    b          timeline, memory: the run that is shown beside the run
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import streamlit as st

from fsdp_inspect.errors import FsdpInspectError
from fsdp_inspect.formatting import format_unit
from fsdp_inspect.result_types import RunEntry
from fsdp_inspect.store.folder import find_named
from fsdp_inspect_app import loading
from fsdp_inspect_app.drawn_chart import Click
from fsdp_inspect_app.empty_states import show_no_runs, show_unreadable
from fsdp_inspect_app.pages import find_page
from fsdp_inspect_app.wording import code

T = TypeVar("T")

RUN_KEY = "run"
"""The run picker's key in session state, and the name in the address."""
STEP_KEY, RANK_KEY, UNIT_KEY = "step", "rank", "unit"
WITH_KEY, BASELINE_KEY, PIN_KEY = "with", "baseline", "pin"

_KEPT = (RUN_KEY, STEP_KEY, RANK_KEY, UNIT_KEY)
"""The parameters that a link to another page keeps."""
_LOST = "run that is not here"
_NOTICES = "place for values of a link that do not exist"
_MOST_LETTERS, _MOST_NAMED = 200, 3
_WRITTEN = "written to the address"
"""Session state: the values that the pages wrote, by parameter. Another value in the address is
from a link."""

Value = str | int | Sequence[str | int] | None
"""The value of a parameter; None removes the parameter."""


def linked(name: str, legal: Collection[str]) -> str | None:
    """The value of a parameter in the address, if it is legal."""
    value = st.query_params.get(name)
    if value in legal:
        return value
    if name != RUN_KEY:
        _report_unknown(name, legal)
    return None


def linked_all(name: str, legal: Collection[str]) -> list[str]:
    """All legal values of a parameter that may repeat."""
    return [value for value in st.query_params.get_all(name) if value in legal]


def link(name: str, value: str | Sequence[str] | None) -> None:
    """Set or remove a parameter of the address."""
    if value is None:
        st.query_params.pop(name, None)
    elif isinstance(value, str):
        st.query_params[name] = value
    else:
        st.query_params[name] = list(value)
    _written()[name] = st.query_params.get_all(name)


def follow(name: str, key: str, legal: Mapping[str, T], default: T) -> None:
    """Set a widget to the value in the address: at its first run, and after a link was followed.

    Call it before the widget with that key is made, give the widget no default value, and call
    `link` with the widget's value afterwards.

    Args:
        name: The parameter.
        key: The key of the widget.
        legal: The legal values in the address, with the widget's value for each.
        default: The widget's value if the address has no legal value.
    """
    if key not in st.session_state or _is_new(name):
        st.session_state[key] = legal.get(st.query_params.get(name, ""), default)
        _report_unknown(name, legal)


def follow_all(name: str, key: str, legal: Mapping[str, T], default: Sequence[T]) -> None:
    """Like `follow`, for a parameter that may repeat and a widget with several values."""
    if key not in st.session_state or _is_new(name):
        asked = dict.fromkeys(legal[value] for value in linked_all(name, legal))
        st.session_state[key] = list(asked) or list(default)
        _report_unknown(name, legal)


def pick(  # noqa: PLR0913 (every argument is a part of the picker, most by name)
    label: str,
    options: Sequence[T],
    default: T,
    *,
    name: str,
    key: str = "",
    show: Callable[..., Any] = st.selectbox,
    is_default_hidden: bool = False,
    **more: Any,
) -> T:
    """Show a picker whose value is in the address; returns the value.

    Args:
        label: The label of the picker.
        options: The values; the address has their texts.
        default: The value without a legal one in the address.
        name: The parameter of the address.
        key: The key of the widget; default: the parameter.
        show: Makes the widget.
        is_default_hidden: Whether the address omits the default.
        more: Further options of the widget.
    """
    key = key or name
    follow(name, key, {str(option): option for option in options}, default)
    if st.session_state[key] not in options:
        st.session_state[key] = default
    chosen: T = show(label, options, key=key, **more)
    link(name, None if is_default_hidden and chosen == default else str(chosen))
    return chosen


def remembered(name: str, legal: Collection[str]) -> list[str]:
    """The values in the address, or else those last stored in this session; updates the address."""
    values = linked_all(name, legal)
    if not values:
        values = [value for value in st.session_state.get(_memory_of(name), []) if value in legal]
    remember(name, values)
    return values


def remember(name: str, values: Sequence[str]) -> None:
    """Put values into the address, and store them while the user is on other pages."""
    st.session_state[_memory_of(name)] = list(values)
    link(name, values or None)


def make_room_for_notices() -> None:
    """Make the place at the top of the page for values of a link that do not exist."""
    st.session_state[_NOTICES] = st.container(key="notices")


def _report_unknown(name: str, legal: Collection[str]) -> None:
    """State which values of a followed link do not exist; once, because the page writes others."""
    if not _is_new(name) or _NOTICES not in st.session_state:
        return
    unknown = [value for value in st.query_params.get_all(name) if value and value not in legal]
    if unknown:
        listed = ", ".join(code(value[:_MOST_LETTERS]) for value in unknown[:_MOST_NAMED])
        shown = "Run B" if name == "b" else name.replace("_", " ").capitalize()
        st.session_state[_NOTICES].warning(
            f"{shown} {listed} of the link was not found\\. The page shows its default instead\\.",
            icon=":material/link_off:",
        )


def _memory_of(name: str) -> str:
    return f"remembered {name}"


def _is_new(name: str) -> bool:
    """Whether the address has a value that no page wrote, because a link was followed."""
    return st.query_params.get_all(name) != _written().get(name, [])


def _written() -> dict[str, list[str]]:
    written: dict[str, list[str]] = st.session_state.setdefault(_WRITTEN, {})
    return written


def follow_run(entries: Mapping[str, RunEntry]) -> None:
    """Set the run picker to the run in the address, or else its last run, or else the first run.

    Args:
        entries: The runs of the folder by their ids, at least one.
    """
    ids = entries.keys()
    same = find_named(entries.values(), st.query_params.get(RUN_KEY, ""))
    asked = same[0].id if len(same) == 1 else None
    if _is_new(RUN_KEY):
        st.session_state[_LOST] = None if asked else st.query_params.get(RUN_KEY) or None
        if asked is not None:
            st.session_state[RUN_KEY] = asked
    if st.session_state.get(RUN_KEY) not in ids:
        st.session_state[RUN_KEY] = asked or next(iter(ids))


def lost_run() -> str | None:
    """The run of a link that is not in the folder, until the user chooses another run."""
    lost: str | None = st.session_state.get(_LOST)
    return lost


def forget_lost_run() -> None:
    """Note that the user chose a run of the folder."""
    st.session_state[_LOST] = None


def page_link(page: str, label: str = "", /, *, icon: Any = "", **selection: Value) -> None:
    """Show a link to another page that keeps run, step, ranks and unit.

    Args:
        page: The page's file in `app_pages/`, without its ending.
        label: The text of the link, as Markdown; names from runs must be `plain`. Default: `Open`
            and the title of the page.
        icon: An icon such as `:material/stacks:`; default: that of the page.
        selection: Other values of parameters; None removes a parameter.
    """
    file, query = find_page(page), _selected(selection)
    label = label or f"Open {file.title}"
    st.page_link(file.path, label=label, icon=icon or file.icon, query_params=query)


def switch_page(page: str, **selection: Value) -> None:
    """Go to another page now; arguments as for `page_link`."""
    st.switch_page(find_page(page).path, query_params=_selected(selection))


def open_column(
    page: str, name: str, legal: Collection[int], **selection: Value
) -> Callable[[Click], None]:
    """Make a handler of clicks: it opens a page at the clicked place of the x axis.

    Args:
        page: As for `page_link`.
        name: The parameter of the place.
        legal: The places; other clicks do nothing.
        selection: As for `page_link`.
    """

    def open_it(click: Click) -> None:
        place = click.column()
        if place in legal:
            switch_page(page, **{name: place}, **selection)

    return open_it


def open_unit(fqn: str | None) -> None:
    """Go to the page of a unit now; does nothing for None."""
    if fqn is not None:
        switch_page("units", **{UNIT_KEY: format_unit(fqn)})


def _selected(selection: Mapping[str, Value]) -> dict[str, str | list[str]]:
    """The parameters of a link: the kept ones and the given ones."""
    kept = {name: st.query_params.get_all(name) for name in _KEPT}
    if (run := st.session_state.get(RUN_KEY)) is not None:
        kept[RUN_KEY] = [run]
    named = {name: _texts(value) for name, value in selection.items()}
    return {name: values for name, values in {**kept, **named}.items() if values}


def _texts(value: Value) -> list[str]:
    if value is None:
        return []
    return [str(value)] if isinstance(value, str | int) else [str(one) for one in value]


def run_name(run: str) -> str:
    """The name of a run for people: its name, then its short unique id."""
    return run_namer()(run)


def run_namer() -> Callable[[str], str]:
    """`run_name` for many runs: the listing is looked up once."""
    names = loading.run_names()
    return lambda run: names.get(run, run)


def chosen_entry() -> RunEntry | None:
    """The run in the run picker; None if there is none."""
    chosen = st.session_state.get(RUN_KEY)
    return next((entry for entry in loading.list_entries() if entry.id == chosen), None)


def entry_or_stop(ask: Callable[[RunEntry], object] | None = None) -> RunEntry:
    """The chosen run; if it cannot be read, the page shows the reason and ends.

    Args:
        ask: A query that the page needs; None: the run's summary.
    """
    entry = chosen_entry()
    if entry is None:
        show_no_runs()
        st.stop()
    answer_or_stop(entry, ask or loading.read_summary)
    return entry


def answer_or_stop(entry: RunEntry, ask: Callable[[RunEntry], T]) -> T:
    """The result of a question about a run; on an error, the page shows the reason and ends."""
    try:
        return ask(entry)
    except FsdpInspectError as error:
        show_unreadable(entry, error)
        st.stop()


# --- Choose a second run, B, whose results a page shows beside those of its run.

SECOND_KEY = "b"
"""The parameter of the address."""
_NONE = "none"


def pick_second_run(entry: RunEntry, *, page: str) -> RunEntry | None:
    """Show the picker; None if no run is chosen, or if the folder has no other run."""
    others = {other.id: other for other in loading.list_entries() if other.id != entry.id}
    if not others:
        return None
    chosen = pick(
        "Run B",
        [_NONE, *others],
        _NONE,
        name=SECOND_KEY,
        key=f"second run of {page}",
        is_default_hidden=True,
        width=170,
        format_func=run_namer(),
    )
    return others.get(chosen)
