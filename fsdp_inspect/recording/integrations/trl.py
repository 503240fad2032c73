"""Record a run of TRL with a callback, for `SFTTrainer` and the other trainers of TRL.

    from trl import SFTConfig, SFTTrainer
    from fsdp_inspect.recording.integrations.trl import FsdpInspectCallback

    args = SFTConfig(
        output_dir="out",
        fsdp="full_shard auto_wrap",
        fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    )
    trainer = SFTTrainer(
        model, args, train_dataset=data, callbacks=[FsdpInspectCallback(path="runs/sft")]
    )
    trainer.train()

A recording contains the trained model. If a trainer also runs a sharded reference model, the
collectives of that model are recorded without a unit.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from fsdp_inspect.recording.integrations import transformers

if find_spec("trl") is None:
    raise ImportError(
        "FsdpInspectCallback requires trl, which is not installed. Install it with "
        "pip install 'fsdp-inspect[record,trl]'."
    )

_NOT_METRICS = ("runtime", "per_second", "epoch", "total_flos", "train_loss")
"""Suffixes of values that the Trainer logs about itself."""


class FsdpInspectCallback(transformers.FsdpInspectCallback):
    """Records each training of a TRL trainer whose model is sharded or replicated.

    In addition to `loss`, `grad_norm`, `learning_rate` and `eval_loss` it records the metrics of
    TRL, such as `entropy`, `mean_token_accuracy`, `num_tokens` and `rewards/...`.

    Args:
        options: Keywords of `fsdp_inspect.Recorder`.
    """

    def select_metrics(self, logs: Mapping[str, Any]) -> dict[str, Any]:
        """Select the metrics of the model and of TRL."""
        return {name: value for name, value in logs.items() if not name.endswith(_NOT_METRICS)}
