"""Search for plans once per run and request, with progress on the page."""

import threading
import time
from collections.abc import Callable
from dataclasses import fields

import streamlit as st

from fsdp_inspect import Run
from fsdp_inspect.result_types import Advice, AdviceRequest, RunEntry
from fsdp_inspect.simulation.simulate import measure_self_check
from fsdp_inspect_app import loading
from fsdp_inspect_app.knobs import PLAN_FILE

_SAY_EVERY_S = 0.4


def advice_of(entry: RunEntry, request: AdviceRequest) -> Advice:
    """The advice for a run; raises as `loading.open_entry`.

    The cache holds the memo, not the function that fills it, because that function writes to the
    page.
    """
    memo = _memo(str(entry.path), loading.contents_of(entry), request)
    if not memo:
        place = st.empty()
        say = _every_so_often(lambda count: place.caption(f"Simulating plans: {count} so far"))
        memo.append(_ask(loading.open_entry(entry), request, say))
        place.empty()
    return memo[0]


def search_in_background(entry: RunEntry, run: Run, *, with_advice: bool) -> str | None:
    """Start the self-check and, if asked, the search with the default request, once.

    Returns:
        None: both are known. Empty: they are not known yet. Else their error.
    """
    path, contents = str(entry.path), loading.contents_of(entry)
    request = default_request(entry)
    memo, checks = _memo(path, contents, request), _checks(path, contents)
    if checks and (memo or not with_advice):
        return None
    state = _searches(path, contents)
    if not state:
        state.append("")

        def search() -> None:
            try:
                checks.append(measure_self_check(run.source))
                if with_advice and not memo:
                    memo.append(_ask(run, request, lambda _: None))
            except Exception as error:  # the page shows it
                state[0] = f"The search for a change failed: {error}"

        threading.Thread(target=search, name="search", daemon=True).start()
    return state[0]


def known_self_check(entry: RunEntry) -> float | None:
    """The self-check of the run, if it is already known."""
    return next(iter(_checks(str(entry.path), loading.contents_of(entry))), None)


@st.cache_resource(max_entries=128, show_spinner=False)
def _checks(path: str, contents: tuple[int, int]) -> list[float]:
    return []


@st.cache_resource(max_entries=128, show_spinner=False)
def _searches(path: str, contents: tuple[int, int]) -> list[str]:
    """Empty, or the error of the search that was started; empty text: it has not failed."""
    return []


def _ask(run: Run, request: AdviceRequest, on_progress: Callable[[int], object]) -> Advice:
    given = {field.name: getattr(request, field.name) for field in fields(request)}
    return run.advise(given.pop("memory_limit"), on_progress=on_progress, **given)


def known_advice(entry: RunEntry) -> Advice | None:
    """The advice for a run with the default request, if it is already known."""
    memo = _memo(str(entry.path), loading.contents_of(entry), default_request(entry))
    return memo[0] if memo else None


def default_request(entry: RunEntry) -> AdviceRequest:
    """The default request of the page Advice, without any choice of the user.

    The page has its own button and command that write the plan.
    """
    return AdviceRequest(run_name=str(entry.path), plan_file=PLAN_FILE, is_written=True)


@st.cache_resource(max_entries=128, show_spinner=False)
def _memo(path: str, contents: tuple[int, int], request: AdviceRequest) -> list[Advice]:
    return []


def _every_so_often(say: Callable[[int], object]) -> Callable[[int], None]:
    """Limit calls to a few per second, and skip them for short searches."""
    last = time.monotonic()

    def on_progress(count: int) -> None:
        nonlocal last
        if time.monotonic() - last > _SAY_EVERY_S:
            last = time.monotonic()
            say(count)

    return on_progress
