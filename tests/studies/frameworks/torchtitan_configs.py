"""Configure torchtitan like its users do; `--module` names this file.

It uses torchtitan's `llama3_debugmodel` and replaces the parts that need a download: the tokenizer
and the data set. The model, the loop, the chunked loss and selective checkpointing are unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from tests.studies.frameworks.losses import LossFile

VOCABULARY = 2048


class RandomTokens(BaseDataLoader):
    """Random tokens, equal in every process of a rank."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        infinite: bool = True

    def __init__(self, config: Config, **kwargs: Any) -> None:
        self._shape = (kwargs["local_batch_size"], kwargs["seq_len"] + 1)
        self._seed = kwargs["dp_rank"]

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        generator = torch.Generator().manual_seed(self._seed)
        while True:
            tokens = torch.randint(0, VOCABULARY, self._shape, generator=generator)
            yield {"input": tokens[:, :-1]}, tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class NoTokenizer(BaseTokenizer):
    """The data consists of tokens, so this does nothing."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **kwargs: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return VOCABULARY


class LossMetrics(MetricsProcessor):
    """Writes each loss that torchtitan logs."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        folder: str = "."

    def __init__(self, config: Config, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        self._losses = LossFile(Path(config.folder))

    def log(self, step: int, global_avg_loss: float, *args: Any, **kwargs: Any) -> None:
        super().log(step, global_avg_loss, *args, **kwargs)
        self._losses.add(global_avg_loss)

    def log_validation(self, loss: float, *args: Any, **kwargs: Any) -> None:
        super().log_validation(loss, *args, **kwargs)
        self._losses.add(loss)


def small() -> Trainer.Config:
    """`llama3_debugmodel` with short sequences, data without a download, and an evaluation."""
    config = llama3_debugmodel()
    config.hf_assets_path = "."
    config.tokenizer = NoTokenizer.Config()
    config.dataloader = RandomTokens.Config()
    config.metrics = LossMetrics.Config(log_freq=1)
    config.validator.enable = True
    config.validator.dataloader = RandomTokens.Config()
    config.validator.freq, config.validator.steps = 4, 2
    config.training.local_batch_size, config.training.seq_len = 2, 64
    config.training.disable_cuda_graphs = True
    config.debug.seed = 0
    return config
