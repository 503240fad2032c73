"""Serve the dashboard, and load the modules of pages before the first request.

`python -m fsdp_inspect_app.server run SCRIPT ...` is like `streamlit run SCRIPT ...`. Streamlit
loads the libraries when the first page opens. This server loads them while the browser starts,
which saves two seconds.
"""

import gc
import importlib
import threading

_ALLOCATIONS_PER_COLLECTION = 50_000
_NEEDED = (
    "pandas",
    "fsdp_inspect.analysis.summary",
    "fsdp_inspect_app.loading",
    "fsdp_inspect_app.app_pages.timeline.frames",
    "fsdp_inspect_app.app_pages.runs.summaries",
    "fsdp_inspect.report.figures",
    "fsdp_inspect.analysis.rank_waits",
    "fsdp_inspect.advice.run_advice",
    "fsdp_inspect.report.html",
)
"""The modules to load, the most important first. Other modules of pages load quickly."""


def main() -> None:
    """Serve until interrupted.

    Python's own garbage collections are rarer than by default, because they took 10% of the time in
    which a run of 4,096 ranks opens. Streamlit collects garbage after every run of the script.
    """
    gc.set_threshold(_ALLOCATIONS_PER_COLLECTION)
    from streamlit.web import cli  # the server starts before the modules of pages load

    threading.Thread(target=load_ahead, name="load-ahead", daemon=True).start()
    cli.main(prog_name="streamlit")


def load_ahead() -> None:
    """Load the modules of pages; a module that fails is reported by the page that needs it.

    Streamlit collects garbage after every run of the script, with the interpreter's lock held. The
    modules are never garbage, but scanning them took 150 ms, and a click runs two scripts. They are
    therefore excluded from the collection.
    """
    for name in _NEEDED:
        try:
            importlib.import_module(name)
        except ImportError:
            return
    gc.freeze()


if __name__ == "__main__":
    main()
