"""Record, inspect and tune PyTorch FSDP runs, one unit at a time.

    from fsdp_inspect import Recorder

    with Recorder(model, optimizer=optimizer, path="runs/llama-1b") as recorder:
        for batch in loader:
            with recorder.step():
                ...

Importing this package imports neither torch nor streamlit: the public names load on first use.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from fsdp_inspect.version import __version__

if TYPE_CHECKING:
    from fsdp_inspect.catalog.catalog import Catalog, open_catalog
    from fsdp_inspect.catalog.index import index_runs
    from fsdp_inspect.debug_page import debug_handlers
    from fsdp_inspect.emulation.forecast.forecast import forecast_memory
    from fsdp_inspect.emulation.forecast.target import ForecastTarget
    from fsdp_inspect.recording.recorder import Recorder
    from fsdp_inspect.recording.torch_api.apply import apply_plan
    from fsdp_inspect.recording.torch_api.observe import observe_plan
    from fsdp_inspect.run import Run, open_run
    from fsdp_inspect.trace.plan import Plan

__all__ = [
    "Catalog",
    "ForecastTarget",
    "Plan",
    "Recorder",
    "Run",
    "__version__",
    "apply_plan",
    "debug_handlers",
    "forecast_memory",
    "index_runs",
    "observe_plan",
    "open_catalog",
    "open_run",
]

_HOMES = {
    "Catalog": "fsdp_inspect.catalog.catalog",
    "ForecastTarget": "fsdp_inspect.emulation.forecast.target",
    "Plan": "fsdp_inspect.trace.plan",
    "Recorder": "fsdp_inspect.recording.recorder",
    "Run": "fsdp_inspect.run",
    "apply_plan": "fsdp_inspect.recording.torch_api.apply",
    "debug_handlers": "fsdp_inspect.debug_page",
    "forecast_memory": "fsdp_inspect.emulation.forecast.forecast",
    "index_runs": "fsdp_inspect.catalog.index",
    "observe_plan": "fsdp_inspect.recording.torch_api.observe",
    "open_catalog": "fsdp_inspect.catalog.catalog",
    "open_run": "fsdp_inspect.run",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_HOMES[name]), name)
    except (ImportError, AttributeError, TypeError) as error:
        if name != "Recorder" or not _is_of_torch(error):
            raise
        from fsdp_inspect.disabled_recorder import DisabledRecorder

        DisabledRecorder.reason = error
        return DisabledRecorder


def _is_of_torch(error: BaseException) -> bool:
    """Whether torch is installed, and a name in it is missing or differs."""
    is_absent = isinstance(error, ModuleNotFoundError) and error.name == "torch"
    return "torch" in sys.modules and not is_absent


def __dir__() -> list[str]:
    return sorted(__all__)
