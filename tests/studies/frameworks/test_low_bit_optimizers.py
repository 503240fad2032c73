"""A forecast with an optimizer of torchao, which stores its state in 8 bits, equals a recording."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_inspect import ForecastTarget
from tests.emulation.forecast.test_plain_models import forecast, record

optimizers = pytest.importorskip("torchao.optim")
pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]

BLOCKS = 3


def build() -> ForecastTarget:
    layer = nn.TransformerEncoderLayer(256, 4, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, BLOCKS, enable_nested_tensor=False)
    for block in model.layers:
        fully_shard(block)
    fully_shard(model)
    optimizer = optimizers.AdamW8bit(model.parameters())
    batch = torch.zeros(2, 16, 256)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return ForecastTarget(model=model, step=step, optimizer=optimizer)


def test_the_state_in_8_bits_is_forecast_to_the_byte(tmp_path: Path) -> None:
    predicted = forecast(build, tmp_path / "forecast", device_type="cpu")
    recorded = record(build, tmp_path / "recorded")

    assert predicted.peak_allocated_bytes == recorded.peak_allocated_bytes
    assert predicted.peak.categories == recorded.peak.categories
