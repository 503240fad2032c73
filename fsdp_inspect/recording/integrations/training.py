"""Open, step and close a recorder from the callbacks of a training library."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from fsdp_inspect.errors import RecordingError
from fsdp_inspect.recording.patches import warn
from fsdp_inspect.recording.recorder import Recorder, check_keywords
from fsdp_inspect.recording.sharders.find import find_sharder, wrapper_around


class RecordedTraining:
    """Records one training after another, driven by a library's callbacks.

    Args:
        options: Keyword arguments of each recorder.
        remedy: The instruction for a user of the library whose model is not sharded.

    Raises:
        TypeError: A keyword is none of the recorder's.
    """

    def __init__(self, options: Mapping[str, Any], remedy: str) -> None:
        check_keywords(options)
        self._options = options
        self._remedy = remedy
        self._recorder: Recorder | None = None
        self._step = ExitStack()
        self._is_in_step = False

    @property
    def recorder(self) -> Recorder | None:
        """The open recording; None outside a training and for a model that cannot be recorded."""
        return self._recorder

    def begin(
        self,
        model: nn.Module,
        config: Mapping[str, Any],
        *,
        is_first_rank: bool,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """Begin recording, or warn on the first rank that this model cannot be recorded.

        Args:
            model: The model that will train, sharded or inside a wrapper.
            config: Settings to store, unless the user passed some.
            is_first_rank: Whether this rank prints the warning.
            optimizer: The optimizer whose step ends a step, unless `begin_step` is used; None
                means any optimizer.
        """
        if self._recorder is not None:
            self.close(RecordingError("a new training began before the previous one ended."))
        options = {"config": config, **self._options}
        try:
            model = wrapper_around(model)
            find_sharder(model)  # a better message than the missing process group
            self._recorder = Recorder(model, optimizer=optimizer, **options)
        except RecordingError as error:
            if is_first_rank:
                warn(f"nothing is recorded: {error} {self._remedy}")

    def begin_step(self) -> None:
        """Begin a step at the first microbatch after the last step ended."""
        if self._recorder is not None and not self._is_in_step:
            self._step.enter_context(self._recorder.step())
            self._is_in_step = True

    def end_step(self) -> None:
        """End the step: the optimizer has stepped."""
        self._is_in_step = False
        self._step.close()

    def log(self, values: Mapping[str, Any]) -> None:
        """Record the values that are numbers."""
        if self._recorder is not None:
            self._recorder.log(
                **{name: value for name, value in values.items() if _is_number(value)}
            )

    def close(self, error: BaseException | None = None) -> None:
        """Close the recording.

        Args:
            error: The exception that ended the training; None if it ended normally.
        """
        self._abandon_step(error)
        if self._recorder is not None:
            self._recorder.close(error)
        self._recorder = None

    def _abandon_step(self, error: BaseException | None) -> None:
        """Leave an incomplete step without recording it as a step."""
        if self._is_in_step:
            reason = error or RecordingError("the training ended within a step.")
            self._is_in_step = False
            self._step.__exit__(type(reason), reason, reason.__traceback__)


def _is_number(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float)) and not isinstance(value, bool)
