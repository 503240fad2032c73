r"""Record a torchtitan run with an override, without a change of its code or configuration.

    torchrun --nproc-per-node 8 -m torchtitan.train --module llama3 --config llama3_8b \
        --override.imports 'fsdp_inspect.recording.integrations.torchtitan.record={"path": "run"}'

In a configuration:

    from torchtitan.config.override import OverrideConfig

    RECORD = "fsdp_inspect.recording.integrations.torchtitan.record"
    config.override = OverrideConfig(imports=[(RECORD, {"path": "runs/llama-8b"})])

The override replaces torchtitan's metrics processor by one that also records. torchtitan calls it
at the beginning of each step, when it logs, and when the training ends or fails.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import nn

from fsdp_inspect.recording.integrations.training import RecordedTraining

try:
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.config.override import derive, override
except ImportError as error:
    raise ImportError(
        "Recording with torchtitan's --override.imports requires torchtitan 0.3 or newer, which "
        "is not installed. Install it with pip install 'fsdp-inspect[record,torchtitan]'."
    ) from error

_REMEDY = "With torchtitan: train on two or more ranks with a data-parallel shard degree above 1."


def record(metrics: Any, /, **options: Any) -> Any:
    """Return a metrics processor's configuration that also records the training.

    torchtitan calls this function if `--override.imports` names it.

    Args:
        metrics: The configuration of the metrics processor, torchtitan's or a subclass of it.
        options: Keywords of `fsdp_inspect.Recorder`.
    """
    return derive(metrics, _recording_config(type(metrics)), recorder_options=dict(options))


override(target=MetricsProcessor.Config, description="Records the run with FSDP Inspect.")(record)


class _RecordsTraining:
    """The part of a metrics processor that records, in front of the original class.

    A step ends when torchtitan's container of optimizers has stepped.
    """

    def __init__(self, config: Any, **arguments: Any) -> None:
        super().__init__(config, **arguments)  # type: ignore[call-arg]
        self._training = RecordedTraining(config.recorder_options, _REMEDY)
        self._settings = arguments.get("config_dict") or {}
        self._has_begun = False

    def should_log(self, step: int) -> bool:
        """Attach before the first step; torchtitan calls it at the beginning of each step."""
        parts: list[nn.Module] | None = getattr(self, "model_parts", None)
        if parts and not self._has_begun:
            self._has_begun = True
            self._training.begin(
                parts[0] if len(parts) == 1 else nn.ModuleList(parts),
                self._settings,
                is_first_rank=dist.get_rank() == 0,
                optimizer=getattr(self, "optimizers", None),
            )
        return bool(super().should_log(step))  # type: ignore[misc]

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        *more: Any,
        **named: Any,
    ) -> None:
        """Record the loss and the gradient norm of the step that has ended."""
        super().log(step, global_avg_loss, global_max_loss, grad_norm, *more, **named)  # type: ignore[misc]
        self._training.log({"loss": global_avg_loss, "grad_norm": grad_norm})

    def log_validation(self, loss: float, *more: Any, **named: Any) -> None:
        """Record the loss of a validation."""
        super().log_validation(loss, *more, **named)  # type: ignore[misc]
        self._training.log({"validation_loss": loss})

    def close(self) -> None:
        """Close the recording; torchtitan closes its parts while it handles a failure."""
        self._training.close(sys.exc_info()[1])
        super().close()  # type: ignore[misc]


def _recording_config(original: Any) -> Any:
    """A configuration like `original` that builds a metrics processor which also records."""

    @dataclass(kw_only=True, slots=True)
    class RecordingConfig(original):  # type: ignore[misc]
        recorder_options: dict[str, Any] = field(default_factory=dict)

    name = f"Recording{original._owner.__name__}"
    type(name, (_RecordsTraining, original._owner), {"Config": RecordingConfig})
    return RecordingConfig
