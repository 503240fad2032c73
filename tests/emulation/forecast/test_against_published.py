"""The difference of a forecast from torchtitan's published memory, and its parts."""

from pathlib import Path

import pytest

from fsdp_inspect import forecast_memory
from fsdp_inspect.analysis.memory.peak import measure_memory
from fsdp_inspect.analysis.memory.reserved import predict_reserved
from fsdp_inspect.store.reader import open_run
from instrumented_trainer.model import PRESETS
from tests.emulation.forecast import torchtitan_like

GIB = 2**30
TOKENS = 2 * torchtitan_like.SEQUENCE
SHAPE = PRESETS["llama-8b"]
KV_WIDTH = SHAPE.dim // SHAPE.num_heads * SHAPE.num_kv_heads
BFLOAT16 = 2


def forecast_peak(path: Path, **settings: object) -> int:
    """The forecast peak of rank 0 of 8, in bytes."""
    forecast_memory(torchtitan_like.build, path, world_size=8, settings=settings)
    peak = measure_memory(open_run(path)).peak_allocated_bytes
    assert peak is not None
    return peak


@pytest.mark.study
def test_llama_8b_on_8_gpus_lies_below_the_reserved_memory_that_torchtitan_read(
    tmp_path: Path,
) -> None:
    peak = forecast_peak(tmp_path / "whole")

    assert peak / GIB == pytest.approx(68.4, abs=0.1)
    assert 0.8 < peak / (82.4 * GIB) < 1


@pytest.mark.study
@pytest.mark.parametrize(("world_size", "published_gib"), [(8, 82.4), (128, 67.0)])
def test_predicted_reserved_memory_is_within_2_percent_of_torchtitans(
    world_size: int, published_gib: float, tmp_path: Path
) -> None:
    forecast_memory(torchtitan_like.build, tmp_path / "run", world_size=world_size)
    reserved = predict_reserved(open_run(tmp_path / "run"), rank=0)

    assert reserved is not None
    assert reserved.peak_reserved_bytes / GIB == pytest.approx(published_gib, rel=0.02)


@pytest.mark.slow
def test_keeping_every_matrix_product_adds_those_that_torchtitan_computes_again(
    tmp_path: Path,
) -> None:
    some = forecast_peak(tmp_path / "some", num_layers=3)
    every = forecast_peak(tmp_path / "every", num_layers=3, every_mm=True)

    # Every second of q, k, v, o, w1, w3 and w2 is recomputed: k, o and w3.
    again = BFLOAT16 * TOKENS * (KV_WIDTH + SHAPE.dim + SHAPE.ffn_dim)
    assert every - some == 3 * again
