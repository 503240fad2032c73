"""Plant a mistake in each part of torchtitan that its configuration can replace.

`--module` names this file, and `--config` a function of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.trainer import Trainer

from tests.studies.frameworks.torchtitan_configs import VOCABULARY, small

_STEPS = 6


class Tokens(IterableDataset[Any]):
    """Random tokens; uneven: the labels of all ranks but the first are mostly ignored."""

    def __init__(self, length: int, seed: int, *, num_valid: int) -> None:
        self._length = length
        self._seed = seed
        self._num_valid = num_valid

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        generator = torch.Generator().manual_seed(self._seed)
        while True:
            tokens = torch.randint(0, VOCABULARY, (self._length + 1,), generator=generator)
            labels = tokens[1:].clone()
            labels[self._num_valid :] = -100
            yield {"input": tokens[:-1]}, labels


class Loader(ParallelAwareDataloader):
    """torchtitan's loader over random tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        is_same: bool = False
        is_uneven: bool = False
        infinite: bool = True

    def __init__(self, config: Config, **given: Any) -> None:
        rank, length = given["dp_rank"], given["seq_len"]
        num_valid = 4 if config.is_uneven and rank else length
        seed = 0 if config.is_same else rank
        super().__init__(
            Tokens(length, seed, num_valid=num_valid),
            rank,
            given["dp_world_size"],
            batch_size=given["local_batch_size"],
        )


class StaleOptimizers(OptimizersContainer):
    """Optimizers of copies of the parameters."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        pass

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        super().__init__(config, model_parts=model_parts)
        for group in (each for optimizer in self.optimizers for each in optimizer.param_groups):
            group["params"] = [nn.Parameter(each.detach().clone()) for each in group["params"]]


class OwnMean(CrossEntropyLoss):
    """A mean over the tokens of each rank, and over the ranks."""

    @dataclass(kw_only=True, slots=True)
    class Config(CrossEntropyLoss.Config):
        pass

    def __call__(
        self,
        pred: torch.Tensor,
        labels: torch.Tensor,
        global_valid_tokens: torch.Tensor | None = None,
        **given: Any,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = nn.functional.cross_entropy(pred.flatten(0, 1).float(), labels.flatten(0, 1))
        return loss / dist.get_world_size(), {}


def none() -> Trainer.Config:
    """Without a mistake, although the numbers of tokens are uneven."""
    config = small()
    config.loss = CrossEntropyLoss.Config()
    config.dataloader = Loader.Config(is_uneven=True)
    config.validator.enable = False
    config.training.steps = _STEPS
    return config


def stale() -> Trainer.Config:
    config = none()
    known = config.optimizer
    config.optimizer = StaleOptimizers.Config(
        param_groups=known.param_groups, implementation=known.implementation
    )
    return config


def same() -> Trainer.Config:
    config = none()
    config.dataloader = Loader.Config(is_same=True)
    return config


def means() -> Trainer.Config:
    config = none()
    config.loss = OwnMean.Config()
    return config


def alone() -> Trainer.Config:
    config = none()
    spec = config.model_spec
    assert spec is not None
    usual = spec.parallelize_fn

    def without_replicas(*given: Any, **options: Any) -> Any:
        model = usual(*given, **options)
        model.set_requires_gradient_sync(False)
        return model

    spec.parallelize_fn = without_replicas
    return config
