"""Where does each question go? Navigation and the run picker; everything else is a page.

streamlit run app/fsdp_inspect_app/streamlit_app.py -- RUNS_DIR
"""

from pathlib import Path

import streamlit as st

from fsdp_inspect_app import loading
from fsdp_inspect_app.selection import OPENED_KEY, RUN_KEY, link, linked

_HERE = Path(__file__).parent
_ICON = str(_HERE / "icon.svg")
_SIDEBAR_PX = 264


def pick_run() -> None:
    """Choose the run that the pages are about, starting from the one in the address."""
    ids = [entry.id for entry in loading.list_entries()]
    if not ids:
        return
    if OPENED_KEY in st.session_state:
        st.session_state[RUN_KEY] = st.session_state.pop(OPENED_KEY)
    if st.session_state.get(RUN_KEY) not in ids:
        st.session_state[RUN_KEY] = linked(RUN_KEY, ids) or ids[0]
    with st.sidebar:
        chosen = st.selectbox("Run", ids, key=RUN_KEY)
    link(RUN_KEY, chosen)


st.set_page_config(
    page_title="FSDP Inspect", layout="wide", page_icon=_ICON, initial_sidebar_state=_SIDEBAR_PX
)
st.logo(str(_HERE / "logo.svg"), size="large", icon_image=_ICON)
st.html(_HERE / "page.css")
page = st.navigation(
    {
        "": [
            st.Page("app_pages/runs.py", title="Runs", icon=":material/list:", url_path="runs"),
        ],
        "This run": [
            st.Page(
                "app_pages/overview.py",
                title="Overview",
                icon=":material/insights:",
                url_path="overview",
            ),
            st.Page(
                "app_pages/timeline.py",
                title="Timeline",
                icon=":material/view_timeline:",
                url_path="timeline",
            ),
            st.Page(
                "app_pages/units.py", title="Units", icon=":material/stacks:", url_path="units"
            ),
        ],
    }
)
pick_run()
page.run()
