"""Page Import: profiler traces and memory snapshots of the folder, which become runs."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import streamlit as st

from fsdp_inspect.errors import StoreError
from fsdp_inspect.formatting import format_bytes, plural
from fsdp_inspect_app import loading
from fsdp_inspect_app.app_pages.imports.jobs import ImportJobs, JobState, JobView
from fsdp_inspect_app.app_pages.imports.sources import (
    ImportSource,
    find_source,
    frame_sources,
    keep_uploads,
    list_sources,
)
from fsdp_inspect_app.cards import show_card, show_headline, show_note
from fsdp_inspect_app.dated import Dated, is_younger_than
from fsdp_inspect_app.empty_states import show_nothing
from fsdp_inspect_app.selection import RUN_KEY, page_link, pick
from fsdp_inspect_app.wording import code, plain

_SOURCE_KEY = "source"
_UPLOADS_KEY = "number of uploads"
_REFRESH_EVERY_S = 1
_LISTING_LIFE_S = 3
_HOW = """# in the training script, once for each rank
prof.export_chrome_trace(f"traces/rank{rank}.json.gz")

# or a snapshot of the CUDA allocator
torch.cuda.memory._dump_snapshot(f"snapshots/rank{rank}.pickle")"""


def show_page() -> None:
    """Show the sources, the choice, and the progress of the import."""
    if isinstance(loading.runs_folder(), str):
        show_nothing(
            "A URL has nothing to import.",
            "This page imports files of a folder on this machine. Start the dashboard with such a "
            "folder, or use fsdp-inspect import and then fsdp-inspect store upload.",
        )
        return
    sources = _list(str(loading.runs_folder())).value
    if not sources:
        show_nothing(
            "This folder has nothing to import.",
            f"Searched {loading.runs_folder()} and four levels below for profiler traces (.json, "
            ".json.gz) and memory snapshots (.pickle). Upload such files, or copy them there. A "
            "folder with one trace for each rank becomes one run.",
            remedy=_HOW,
        )
        _show_upload()
        return
    jobs = _jobs(str(loading.runs_folder()))
    show_headline(plain(_answer(sources)))
    _show_job(jobs)
    _show_choice(sources, jobs)
    _show_upload()
    with st.expander(f"All {len(sources)} sources to import"):
        st.dataframe(frame_sources(sources), hide_index=True, alt="Sources to import, one row each")
    show_note(
        f"This page imports files of {code(str(loading.runs_folder()))} into its folder "
        f"{code('imported/')}\\. For other folders, use {code('fsdp-inspect import')}\\."
    )


@st.cache_resource(
    validate=is_younger_than(_LISTING_LIFE_S), max_entries=4, show_spinner="Looking for traces"
)
def _list(folder: str) -> Dated[list[ImportSource]]:
    return Dated(list_sources(Path(loading.runs_folder())))


@st.cache_resource(max_entries=4, show_spinner=False)
def _jobs(folder: str) -> ImportJobs:
    """One object for all sessions, so that a reloaded page shows the running import."""
    return ImportJobs(Path(loading.runs_folder()))


def _answer(sources: Sequence[ImportSource]) -> str:
    counts = Counter(source.kind for source in sources)
    named = [
        plural(count, kind, kind.replace("folder", "folders") if "folder" in kind else None)
        for kind, count in counts.items()
    ]
    listed = " and ".join(filter(None, (", ".join(named[:-1]), named[-1])))
    return f"{listed} can become {'a run' if len(sources) == 1 else 'runs'}."


def _show_upload() -> None:
    """Take files from the browser, several for a run of several ranks."""
    number = st.session_state.setdefault(_UPLOADS_KEY, 0)
    with st.container(border=True, key="card-upload"):
        files = st.file_uploader(
            "Upload a trace or a snapshot, or one for each rank",
            accept_multiple_files=True,
            key=f"upload-{number}",
        )
        if not st.button("Save uploads", disabled=not files, icon=":material/upload:"):
            return
    try:
        name = keep_uploads(Path(loading.runs_folder()), files)
    except StoreError as error:
        st.error(plain(str(error)), icon=":material/error:")
        return
    st.session_state[_UPLOADS_KEY] = number + 1  # an empty uploader
    _list.clear()
    st.query_params[_SOURCE_KEY] = name
    st.rerun()


def _show_choice(sources: Sequence[ImportSource], jobs: ImportJobs) -> None:
    names = {source.name: source for source in sources}
    with show_card("Import", key="import"):
        left, right = st.columns([3, 2])
        with left:
            key, options = "import source", list(names)
            chosen = pick("File or folder", options, options[0], name=_SOURCE_KEY, key=key)
        source = names[chosen]
        with right:
            name = st.text_input("Run name", placeholder="name of the file", key="import name")
        files = (
            "1 file" if source.num_files == 1 else f"{source.num_files} files, one for each rank"
        )
        show_note(plain(f"A {source.kind.value}: {files}, {format_bytes(source.num_bytes)}."))
        by_step = not source.kind.is_snapshot and st.toggle(
            "One step per ProfilerStep",
            value=True,
            key="import by step",
            help="Without it, and without such marks, the whole trace is one step\\.",
        )
        is_busy = jobs.view is not None and jobs.view.state is JobState.RUNNING
        if st.button("Import", type="primary", disabled=is_busy, icon=":material/input:"):
            _start(jobs, chosen, name, by_step)


def _start(jobs: ImportJobs, chosen: str, name: str, by_step: bool) -> None:
    """Start the import if the source still exists: the name is looked up in the current list."""
    source = find_source(Path(loading.runs_folder()), chosen)
    if source is None:
        st.error(plain(f"{chosen!r} not found: the file was removed. Choose another source."))
        return
    try:
        jobs.start(source, name=name, by_step=by_step)
    except (StoreError, RuntimeError, OSError) as error:
        st.error(plain(str(error)), icon=":material/error:")
        return
    st.rerun()


def _show_job(jobs: ImportJobs) -> None:
    view = jobs.view
    if view is None:
        return
    every = _REFRESH_EVERY_S if view.state is JobState.RUNNING else None
    st.fragment(_show_progress, run_every=every)(jobs, is_running=every is not None)


def _show_progress(jobs: ImportJobs, *, is_running: bool) -> None:
    """Show the running import, or the last one; the page reruns when it ends."""
    view = jobs.view
    if view is None:
        return
    if is_running and view.state is not JobState.RUNNING:
        loading.look_again()
        if view.state is JobState.DONE:
            st.query_params[RUN_KEY] = view.run_id  # the run picker shows the new run
        st.rerun()
    match view.state:
        case JobState.RUNNING:
            _show_running(view)
            if st.button("Cancel", icon=":material/close:", key="import cancel"):
                jobs.cancel()
                st.rerun()
        case JobState.DONE:
            _show_done(view)
        case JobState.FAILED:
            st.error(
                f"{code(view.source.name)} was not imported\\. {plain(view.error or '')}",
                icon=":material/error:",
            )
        case JobState.CANCELLED:
            st.info(
                f"The import of {code(view.source.name)} was cancelled and left no files\\.",
                icon=":material/info:",
            )


def _show_running(view: JobView) -> None:
    if view.share is None:
        st.progress(0.0, f"Reading {code(view.source.name)}")
    else:
        st.progress(view.share, f"Reading {code(view.file)}")


def _show_done(view: JobView) -> None:
    notes = "\n".join(f"- {plain(note)}" for note in view.notes)
    st.success(
        f"{code(view.source.name)} is now the run {code(view.run_id)}\\.\n{notes}",
        icon=":material/check:",
    )
    page = "memory" if view.source.kind.is_snapshot else "overview"
    page_link(
        page,
        "Open the run",
        icon=":material/open_in_new:",
        run=view.run_id,
        step=None,
        rank=None,
        unit=None,
    )


show_page()
