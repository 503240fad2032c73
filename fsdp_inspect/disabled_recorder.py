"""Stand in for the recorder if the installed torch lacks a name that it needs.

The recorder reads private objects of torch. If another version has renamed or removed one, the
training continues without a recording.
"""

import contextlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any, Self


def describe_unsupported(error: BaseException) -> str:
    """One sentence: the name that is missing or differs, the version of torch, and what is lost."""
    torch: Any = sys.modules.get("torch")
    version = getattr(torch, "__version__", "of an unknown version")
    reason = " ".join(repr(error).split())
    return (
        f"nothing is recorded: the recorder could not start with torch {version}: {reason}. The "
        "training continues unchanged. If torch lacks this name, install a newer fsdp-inspect, or "
        "a version of torch that it supports."
    )


class DisabledRecorder:
    """Has the methods of `Recorder` and records nothing; says so once."""

    reason: BaseException = RuntimeError("unknown")
    """The error of importing the recorder."""
    run_folder = None
    is_recording = False

    def __init__(self, *args: Any, enabled: bool = True, **kwargs: Any) -> None:
        self.problems: list[str] = []
        if not enabled:
            return
        with contextlib.suppress(RuntimeWarning):  # warnings may be errors
            sentence = describe_unsupported(self.reason)
            warnings.warn(f"fsdp_inspect: {sentence}", RuntimeWarning, stacklevel=2)
        self.problems = [describe_unsupported(self.reason)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Do nothing."""

    @contextlib.contextmanager
    def _block(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    step = data = between_steps = _block

    def log(self, *args: Any, **values: Any) -> None:
        """Do nothing."""

    detail = note = detach = close = join_forward = log
