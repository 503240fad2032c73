"""Run the dashboard: navigation, the run picker, and the chosen page.

`asgi` serves this script behind the guard. `streamlit run` on this script alone has no guard.
"""

from pathlib import Path

import streamlit as st

from fsdp_inspect.errors import FsdpInspectError
from fsdp_inspect.report.charts.chart import read_style
from fsdp_inspect.result_types import RunStatus
from fsdp_inspect.store.folder import find_named
from fsdp_inspect_app import loading
from fsdp_inspect_app.cards import stop_exploring
from fsdp_inspect_app.command_palette import show_command_palette
from fsdp_inspect_app.empty_states import show_failure
from fsdp_inspect_app.exports import show_download
from fsdp_inspect_app.guard import has_access, require_login
from fsdp_inspect_app.page_sheet import start_sheet
from fsdp_inspect_app.pages import (
    ALL_PAGES,
    FIRST,
    LIVE,
    SECTIONS,
    PageFile,
    find_page,
    is_about_one_run,
)
from fsdp_inspect_app.saved_views import list_views, show_views
from fsdp_inspect_app.selection import (
    RUN_KEY,
    follow_run,
    forget_lost_run,
    link,
    lost_run,
    make_room_for_notices,
    run_name,
    run_namer,
)
from fsdp_inspect_app.wording import code

_HERE = Path(__file__).parent
_ICON = str(_HERE / "icon.svg")
_SIDEBAR_PX = 264
_MOST_LETTERS = 200
_PICKED_LETTERS = 26
_MOST_PICKED = 500  # runs of the picker, whose names are all sent to the browser
_NO_MANIFEST = (
    "Its folder has no run\\.json\\. Copy the file from the machine that recorded the run\\."
)


def show_sidebar(pages: list[PageFile], shown: PageFile) -> None:
    """Show the run picker, the palette, the saved views, and the button that saves the page."""
    sheet = start_sheet(shown.title)
    entries = {entry.id: entry for entry in loading.list_entries()}
    ids = [*entries]
    if not ids:
        return
    follow_run(entries)
    with st.sidebar:
        picked = [*dict.fromkeys([*ids[:_MOST_PICKED], st.session_state[RUN_KEY]])]
        chosen = st.selectbox(
            "Run",
            picked,
            key=RUN_KEY,
            on_change=forget_lost_run,
            format_func=run_namer(),
            help=None if len(ids) <= _MOST_PICKED else _describe_picked(len(ids)),
        )
        if len(run_name(chosen)) > _PICKED_LETTERS:  # the picker cuts it
            st.caption(code(chosen))
    link(RUN_KEY, chosen)
    if is_about_one_run(shown):
        sheet.run = run_name(chosen)
        st.set_page_config(page_title=f"{shown.title} - {sheet.run} - FSDP Inspect")
    views = list_views()
    with st.sidebar:
        show_command_palette(pages, ids, chosen, views)
        with st.container(horizontal=True, gap="small", key="page-actions"):
            show_views(shown.name, views)
            show_download(sheet)
    _show_lost(chosen)
    make_room_for_notices()


def _describe_picked(num_runs: int) -> str:
    return (
        f"The newest {_MOST_PICKED:,} of {num_runs:,} runs. Find the others with Ctrl+K or on the "
        "page Runs."
    )


def _show_lost(chosen: str) -> None:
    lost = lost_run()
    if lost is not None:
        same = [entry.id for entry in find_named(loading.list_entries(), lost)]
        why = f"means {len(same)} runs: {', '.join(map(code, same))}" if same else "was not found"
        st.warning(
            f"Run {code(lost[:_MOST_LETTERS])} of the link {why}\\. Shown instead: "
            f"{code(run_name(chosen))}\\."
            + (f" {_NO_MANIFEST}" if lost in loading.list_without_manifest() else ""),
            icon=":material/link_off:",
        )


def make_page(file: PageFile, *, is_listed: bool) -> st.Page:
    """One page, which the navigation lists or hides."""
    return st.Page(
        file.path,
        title=file.title,
        icon=file.icon,
        url_path=file.address,
        default=file.name == FIRST,
        visibility="visible" if is_listed else "hidden",
    )


def visible_pages(*, is_live: bool) -> list[PageFile]:
    """The pages that the navigation lists: Live only for a run that is being recorded."""
    return [file for file in ALL_PAGES if is_live or file.name != LIVE]


def is_chosen_live() -> bool:
    """Whether the chosen run is being recorded."""
    entries = {entry.id: entry for entry in loading.list_entries()}
    if not entries:
        return False
    follow_run(entries)
    try:
        run = loading.open_entry(entries[st.session_state[RUN_KEY]])
    except FsdpInspectError:
        return False
    return run.source.status is RunStatus.RUNNING


def shown_page(page: st.Page) -> PageFile:
    """The file of a page of the navigation."""
    return next((file for file in ALL_PAGES if file.address == page.url_path), find_page(FIRST))


def open_first() -> None:
    """Show the first page under its name. Streamlit serves it only at the server's address."""
    asked = {name: st.query_params.get_all(name) for name in st.query_params}
    st.switch_page(find_page(FIRST).path, query_params=asked)


st.set_page_config(layout="wide", page_icon=_ICON, initial_sidebar_state=_SIDEBAR_PX)
st.logo(str(_HERE / "logo.svg"), size="large", icon_image=_ICON)
sheets = [(_HERE / name).read_text(encoding="utf-8") for name in ("page.css", "diagnosis.css")]
st.html(f"<style>{''.join(sheets)}{read_style()}</style>")
listed = visible_pages(is_live=has_access() and is_chosen_live())
menu = {
    section: [make_page(file, is_listed=file in listed) for file in files]
    for section, files in SECTIONS.items()
}
menu[""].append(st.Page(open_first, title=FIRST, url_path=FIRST, visibility="hidden"))
stop_exploring()
page = st.navigation(menu, expanded=True)
st.set_page_config(page_title=f"{page.title} - FSDP Inspect")
require_login()
show_sidebar(listed, shown_page(page))
try:
    page.run()
except Exception as error:  # the page shows the error, and the log has the traceback
    show_failure(error)
