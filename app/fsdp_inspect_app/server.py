"""A server that loads the modules of pages while it waits for the first request.

`python -m fsdp_inspect_app.server run SCRIPT ...` does what `streamlit run SCRIPT ...` does.
Streamlit loads the libraries when the first page opens. This server loads them while the browser
starts, which saves two seconds.
"""

import gc
import importlib
import threading

_NEEDED = (
    "pandas",
    "fsdp_inspect.analysis.summary",
    "fsdp_inspect_app.loading",
    "fsdp_inspect_app.frames.timeline",
    "fsdp_inspect_app.summaries",
    "fsdp_inspect.report.figures",
    "fsdp_inspect.analysis.rank_waits",
    "fsdp_inspect.advice.run_advice",
    "fsdp_inspect.report.html",
)
"""Most wanted first; what pages load beyond these takes no time."""


def main() -> None:
    """Serve until interrupted."""
    from streamlit.web import cli  # the server itself comes before what its pages need

    threading.Thread(target=load_ahead, name="load-ahead", daemon=True).start()
    cli.main(prog_name="streamlit")


def load_ahead() -> None:
    """Load what pages need; what cannot be loaded is left to the page that says so.

    Streamlit collects garbage after every run of the script, with the interpreter's lock held. The
    modules are never garbage: looking through them took 150 ms, and a click runs two scripts.
    """
    for name in _NEEDED:
        try:
            importlib.import_module(name)
        except ImportError:
            return
    gc.freeze()


if __name__ == "__main__":
    main()
