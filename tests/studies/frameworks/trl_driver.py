"""Fine-tune with TRL and FSDP2, on CPU.

torchrun --nproc-per-node 2 trl_driver.py FOLDER [--callback]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from tests.studies.frameworks.small_models import LENGTH, VOCABULARY, token_rows
from tests.studies.frameworks.transformers_driver import Losses, arguments, sharded_llama


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer without files, with one word for each number."""
    words = {str(number): number for number in range(VOCABULARY)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="0")), pad_token="0", eos_token="1"
    )


def main(folder: Path, *, with_callback: bool) -> None:
    callbacks: list[Any] = [Losses(folder)]
    if with_callback:
        from fsdp_inspect.recording.integrations.trl import FsdpInspectCallback

        callbacks.append(FsdpInspectCallback(path=folder / "run"))
    rows = token_rows(72)
    SFTTrainer(
        sharded_llama(folder),
        SFTConfig(max_length=LENGTH, **arguments(folder)),
        train_dataset=Dataset.from_dict({"input_ids": rows[:64]}),
        eval_dataset=Dataset.from_dict({"input_ids": rows[64:]}),
        processing_class=tokenizer(),
        callbacks=callbacks,
    ).train()


if __name__ == "__main__":
    main(Path(sys.argv[1]), with_callback="--callback" in sys.argv)
