"""The Trainer of Transformers with `--fsdp "full_shard auto_wrap"`, on CPU.

    torchrun --nproc-per-node 2 fsdp_option_driver.py FOLDER VERSION [--callback]

VERSION is that of `fsdp_config`: 1 is FullyShardedDataParallel, 2 is fully_shard. The settings are
parsed from a command line, as the training scripts of Transformers do.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from transformers import HfArgumentParser, TrainingArguments

from tests.studies.frameworks.cpu_fsdp import CpuFsdpTrainer
from tests.studies.frameworks.small_models import examples, llama
from tests.studies.frameworks.transformers_driver import Losses, arguments


def parsed(folder: Path, version: int) -> TrainingArguments:
    """The arguments of a script that is started with `--fsdp`."""
    config = folder / "fsdp.json"
    settings = {"version": version, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    if version == 1:
        settings["sync_module_states"] = False  # torch requires a device for it
    config.write_text(json.dumps(settings))
    words = ["--fsdp", "full_shard auto_wrap", "--fsdp_config", str(config)]
    for name, value in arguments(folder).items():
        if name != "report_to":
            words += [f"--{name}", str(value)]
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(words)
    args.report_to = []
    return args


def main(folder: Path, version: int, *, with_callback: bool) -> None:
    callbacks: list[Any] = [Losses(folder)]
    if with_callback:
        from fsdp_inspect.recording.integrations.transformers import FsdpInspectCallback

        callbacks.append(FsdpInspectCallback(path=folder / "run"))
    CpuFsdpTrainer(
        llama(),
        parsed(folder, version),
        train_dataset=examples(64),
        eval_dataset=examples(8),
        callbacks=callbacks,
    ).train()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), with_callback="--callback" in sys.argv)
