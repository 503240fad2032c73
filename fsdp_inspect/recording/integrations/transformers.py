"""Record a run of the Hugging Face Trainer with a callback.

    from transformers import Trainer, TrainingArguments
    from fsdp_inspect.recording.integrations.transformers import FsdpInspectCallback

    args = TrainingArguments(
        output_dir="out",
        fsdp="full_shard auto_wrap",
        fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    )
    trainer = Trainer(
        model, args, train_dataset=data, callbacks=[FsdpInspectCallback(path="runs/llama-1b")]
    )
    trainer.train()

The Trainer has no hook for a failing training. The recording then closes when the process ends,
with the exception that ended the process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsdp_inspect.recording.integrations.training import RecordedTraining

try:
    from transformers import (
        TrainerCallback,
        TrainerControl,
        TrainerState,
        TrainingArguments,
    )
except ImportError as error:
    raise ImportError(
        "FsdpInspectCallback requires transformers, which is not installed. Install it with "
        "pip install 'fsdp-inspect[record,hf]'."
    ) from error

_REMEDY = (
    "With the Hugging Face Trainer: start several processes (DDP), or set fsdp and fsdp_config "
    "(version 2 or 1) in TrainingArguments, or "
    "from_pretrained(..., distributed_config=DistributedConfig(fsdp_size=N))."
)
_LOGGED = ("loss", "grad_norm", "learning_rate", "eval_loss")


class FsdpInspectCallback(TrainerCallback):
    """Records each training of a Trainer whose model is sharded (FSDP2, FSDP1) or replicated (DDP).

    A step is a step of the Trainer, with all its microbatches. `loss`, `grad_norm`,
    `learning_rate` and `eval_loss` are recorded whenever the Trainer logs them. The
    `TrainingArguments` are stored as the run's configuration.

    Args:
        options: Keywords of `fsdp_inspect.Recorder`.
    """

    def __init__(self, **options: Any) -> None:
        self._training = RecordedTraining(options, _REMEDY)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attach: the model is prepared."""
        self._training.begin(
            kwargs["model"], args.to_sanitized_dict(), is_first_rank=state.is_world_process_zero
        )

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin a step at its first microbatch."""
        self._training.begin_step()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """End the step; logging, evaluation and checkpoints come after."""
        self._training.end_step()

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Record the values that the Trainer logs."""
        self._training.log(self.select_metrics(kwargs.get("logs") or {}))

    def select_metrics(self, logs: Mapping[str, Any]) -> dict[str, Any]:
        """Select the values to record from those that the Trainer logs."""
        return {name: logs[name] for name in _LOGGED if name in logs}

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Close the recording: the training ended normally."""
        self._training.close()
