"""Save the current page with its address under a name, and open saved views again."""

from collections.abc import Sequence
from urllib.parse import parse_qs, urlencode

import streamlit as st

from fsdp_inspect.errors import StoreError
from fsdp_inspect_app import loading
from fsdp_inspect_app.pages import ALL_PAGES
from fsdp_inspect_app.user_store import LONGEST_NAME, SavedView, user_store
from fsdp_inspect_app.wording import plain

_NAME_KEY = "name of the view"
_FAILED = "view that was not saved"


def list_views() -> list[SavedView]:
    """The saved views of the folder whose pages exist; empty if they cannot be read."""
    store = user_store()
    if store is None:
        return []
    try:
        views = store.views(loading.folder_key())
    except StoreError:
        return []
    return [view for view in views if _path_of(view) is not None]


def show_views(page: str, views: Sequence[SavedView]) -> None:
    """Show the button with all saved views, and the form that saves the current page.

    Args:
        page: The name of the current page's file.
        views: The saved views.
    """
    if user_store() is None:
        return
    label = f"Views: {len(views)}" if views else "Views"
    with st.popover(label, icon=":material/bookmark:", type="tertiary", key="views"):
        for view in views:
            _show_view(view)
        with st.form("save-view", border=False, clear_on_submit=True):
            st.text_input(
                "Save this page as", key=_NAME_KEY, max_chars=LONGEST_NAME, placeholder="name"
            )
            st.form_submit_button("Save view", on_click=_save, args=(page,))
        failed = st.session_state.pop(_FAILED, None)
        if failed:
            st.error(plain(failed), icon=":material/error:")


def open_view(view: SavedView) -> None:
    """Go to the page of a view now."""
    path = _path_of(view)
    if path is not None:
        st.switch_page(path, query_params=parse_qs(view.query))


def _show_view(view: SavedView) -> None:
    path = _path_of(view)
    if path is None:
        return
    with st.container(horizontal=True, vertical_alignment="center", gap="small"):
        st.page_link(path, label=plain(view.name), query_params=parse_qs(view.query))
        st.button(
            "Delete",
            icon=":material/delete:",
            help=plain(f"Delete the view {view.name}"),
            type="tertiary",
            key=f"delete view {view.name}",
            on_click=_remove,
            args=(view.name,),
        )


def _path_of(view: SavedView) -> str | None:
    return next((page.path for page in ALL_PAGES if page.name == view.page), None)


def _save(page: str) -> None:
    """Save the address as the browser shows it."""
    asked = {name: st.query_params.get_all(name) for name in st.query_params}
    view = SavedView(str(st.session_state.get(_NAME_KEY, "")), page, urlencode(asked, doseq=True))
    store = user_store()
    if store is None:
        return
    try:
        store.keep_view(loading.folder_key(), view)
    except StoreError as error:
        st.session_state[_FAILED] = str(error)


def _remove(name: str) -> None:
    store = user_store()
    if store is None:
        return
    try:
        store.remove_view(loading.folder_key(), name)
    except StoreError as error:
        st.session_state[_FAILED] = str(error)
