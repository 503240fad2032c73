"""What does a tensor without contents answer when it is asked for its value? Zero, which is said.

Training loops ask: `loss.item()` for the log, `if torch.isnan(loss)`, a DataLoader for its seed, a
gradient scaler for what overflowed. None of it decides how much memory a step takes. Where a value
does decide sizes a forecast cannot know them: who reads it learns where the step asked.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

_ASKING = torch.ops.aten._local_scalar_dense.default
_OURS = Path(__file__).parents[1]
_PYTHON = Path(traceback.__file__).parent


class ValuelessTensors(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Fake tensors that answer 0 where torch's own refuse to answer."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.num_asked = 0
        """How often a tensor was asked for a value that nobody knows."""
        self.first_asked = ""
        """Where in the user's own code that was first: `step, train.py:30`."""

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As torch does; see the class."""
        try:
            return super().dispatch(func, types, args, kwargs)
        except DataDependentOutputException:
            if func is not _ASKING:
                raise
        self.num_asked += 1
        self.first_asked = self.first_asked or describe_user_line(traceback.extract_stack())
        return _zero(args[0].dtype)


def _zero(dtype: torch.dtype) -> complex:
    """As Python has it: False, 0, 0.0 or 0j."""
    if dtype is torch.bool:
        return False
    return 0j if dtype.is_complex else 0.0 if dtype.is_floating_point else 0


def describe_user_line(frames: traceback.StackSummary) -> str:
    """The last line of the user's own code among these; of a library, if there is none."""
    own = [frame for frame in frames if not _is_of_a_library(Path(frame.filename))]
    last = (own or frames)[-1]
    return f"{last.name}, {last.filename}:{last.lineno}"


def _is_of_a_library(file: Path) -> bool:
    in_python = _PYTHON in file.parents
    return "site-packages" in file.parts or file.is_relative_to(_OURS) or in_python
