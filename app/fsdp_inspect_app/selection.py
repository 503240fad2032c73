"""Read and write the selection in the address: run, step, rank and unit, all validated.

An address holds names and numbers from listings, never a path: what is not in the listing is as
if it were not there. The parameters, on all pages:

    run        the run that the page is about: its id below the folder
    step       one step
    rank       one rank; may repeat
    unit       a unit as it is shown: its fqn, or `(root)`
    with       a run that is compared; repeats
    baseline   the run that the others are compared with
    pin        a run that is listed first; repeats
    window     timeline: START-END, ns from the start of the step
    span       timeline: RANK-NUMBER of the selected event
    top        timeline: a rank that stays at the top; repeats
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar
from urllib.parse import urlencode

import streamlit as st

from fsdp_inspect.errors import FsdpInspectError
from fsdp_inspect.formatting import format_unit
from fsdp_inspect.result_types import RunEntry
from fsdp_inspect_app import loading
from fsdp_inspect_app.empty_states import show_no_runs, show_unreadable
from fsdp_inspect_app.pages import find_page

T = TypeVar("T")

RUN_KEY = "run"
"""The run picker's key in session state, and the name in the address."""
STEP_KEY, RANK_KEY, UNIT_KEY = "step", "rank", "unit"
WITH_KEY, BASELINE_KEY, PIN_KEY = "with", "baseline", "pin"

_KEPT = (RUN_KEY, STEP_KEY, RANK_KEY, UNIT_KEY)
"""What a link to another page takes along."""
_LOST = "run that is not here"
_TITLE = "title of the page"
_WRITTEN = "written to the address"
"""Session state: what the pages wrote, by parameter; another value there is a link's."""

Value = str | int | Sequence[str | int] | None
"""Of a parameter; None: without it."""


def linked(name: str, legal: Collection[str]) -> str | None:
    """The value of the address's parameter, if it is one of the legal ones."""
    value = st.query_params.get(name)
    return value if value in legal else None


def linked_all(name: str, legal: Collection[str]) -> list[str]:
    """All legal values of a parameter that may repeat."""
    return [value for value in st.query_params.get_all(name) if value in legal]


def link(name: str, value: str | Sequence[str] | None) -> None:
    """Put a value into the address, or take it out."""
    if value is None:
        st.query_params.pop(name, None)
    elif isinstance(value, str):
        st.query_params[name] = value
    else:
        st.query_params[name] = list(value)
    _written()[name] = st.query_params.get_all(name)


def follow(name: str, key: str, legal: Mapping[str, T], default: T) -> None:
    """Let a widget show what the address names: at its first run, and when a link was followed.

    Call it before the widget of that key is made, give the widget no value of its own, and `link`
    what it says afterwards.

    Args:
        name: The parameter.
        key: The widget's.
        legal: What the address may name, and the widget's value for it.
        default: The widget's value if the address names nothing legal.
    """
    if key not in st.session_state or _is_new(name):
        st.session_state[key] = legal.get(st.query_params.get(name, ""), default)


def follow_all(name: str, key: str, legal: Mapping[str, T], default: Sequence[T]) -> None:
    """As `follow`, for a parameter that may repeat and a widget of several values."""
    if key not in st.session_state or _is_new(name):
        asked = dict.fromkeys(legal[value] for value in linked_all(name, legal))
        st.session_state[key] = list(asked) or list(default)


def remembered(name: str, legal: Collection[str]) -> list[str]:
    """What the address names, or else what was last remembered in this session; it says so then."""
    values = linked_all(name, legal)
    if not values:
        values = [value for value in st.session_state.get(_memory_of(name), []) if value in legal]
    remember(name, values)
    return values


def remember(name: str, values: Sequence[str]) -> None:
    """Put values into the address, and keep them while other pages are looked at."""
    st.session_state[_memory_of(name)] = list(values)
    link(name, values or None)


def _memory_of(name: str) -> str:
    return f"remembered {name}"


def _is_new(name: str) -> bool:
    """Whether the address names something that no page wrote there: a link was followed."""
    return st.query_params.get_all(name) != _written().get(name, [])


def _written() -> dict[str, list[str]]:
    written: dict[str, list[str]] = st.session_state.setdefault(_WRITTEN, {})
    return written


def follow_run(ids: Collection[str]) -> None:
    """Let the run picker show the run that the address names; else what it showed, or the first.

    Args:
        ids: The runs of the folder, at least one.
    """
    asked = linked(RUN_KEY, ids)
    if _is_new(RUN_KEY):
        st.session_state[_LOST] = None if asked else st.query_params.get(RUN_KEY) or None
        if asked is not None:
            st.session_state[RUN_KEY] = asked
    if st.session_state.get(RUN_KEY) not in ids:
        st.session_state[RUN_KEY] = asked or next(iter(ids))


def lost_run() -> str | None:
    """The run that a link named and that is not here, until another one is chosen."""
    lost: str | None = st.session_state.get(_LOST)
    return lost


def forget_lost_run() -> None:
    """A run that is here was chosen."""
    st.session_state[_LOST] = None


def page_link(page: str, label: str, *, icon: str | None = None, **selection: Value) -> None:
    """A link to another page, with run, step, ranks and unit taken along.

    Args:
        page: The page's file in `app_pages/`, without its ending.
        label: What is written, as Markdown: make names from runs `plain`.
        icon: Such as `:material/stacks:`.
        selection: What the link names instead; None leaves a parameter out.
    """
    file = find_page(page)
    if file.exists:
        st.page_link(file.path, label=label, icon=icon, query_params=_selected(selection))


def switch_page(page: str, **selection: Value) -> None:
    """Go to another page now; as `page_link`."""
    st.switch_page(find_page(page).path, query_params=_selected(selection))


def open_unit(fqn: str | None) -> None:
    """Go to the page of a unit now; None is no unit, and leads nowhere."""
    if fqn is not None:
        switch_page("units", **{UNIT_KEY: format_unit(fqn)})


def show_title(title: str) -> None:
    """Note the title of the page that is shown, for the browser's tab."""
    st.session_state[_TITLE] = title


def shown_page() -> str:
    """The title of the page that is shown."""
    return str(st.session_state.get(_TITLE, ""))


def page_address(page: str, **selection: Value) -> str:
    """The relative address of a page, as `page_link`; for tables of links and for sharing."""
    address = find_page(page).address
    return f"{address}?{urlencode(_selected(selection), doseq=True)}"


def _selected(selection: Mapping[str, Value]) -> dict[str, str | list[str]]:
    """The parameters of a link: those that are kept, and those that it names."""
    kept = {name: st.query_params.get_all(name) for name in _KEPT}
    if (run := st.session_state.get(RUN_KEY)) is not None:
        kept[RUN_KEY] = [run]
    named = {name: _texts(value) for name, value in selection.items()}
    return {name: values for name, values in {**kept, **named}.items() if values}


def _texts(value: Value) -> list[str]:
    if value is None:
        return []
    return [str(value)] if isinstance(value, str | int) else [str(one) for one in value]


def chosen_entry() -> RunEntry | None:
    """The run that the picker shows; None if there is none."""
    chosen = st.session_state.get(RUN_KEY)
    return next((entry for entry in loading.list_entries() if entry.id == chosen), None)


def entry_or_stop(ask: Callable[[RunEntry], object] | None = None) -> RunEntry:
    """The chosen run, readable; without one the page says why and ends.

    Args:
        ask: What the page rests on; None: the run's summary.
    """
    entry = chosen_entry()
    if entry is None:
        show_no_runs()
        st.stop()
    answer_or_stop(entry, ask or loading.read_summary)
    return entry


def answer_or_stop(entry: RunEntry, ask: Callable[[RunEntry], T]) -> T:
    """What a question about a run is answered; one that cannot be read ends the page, with why."""
    try:
        return ask(entry)
    except FsdpInspectError as error:
        show_unreadable(entry, error)
        st.stop()
