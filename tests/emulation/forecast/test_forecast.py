"""Forecasts equal the memory of real tensors, byte for byte, under many plans."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_inspect.analysis.memory.peak import measure_memory
from fsdp_inspect.emulation.forecast.forecast import forecast_memory
from fsdp_inspect.emulation.forecast.target import ForecastTarget
from fsdp_inspect.errors import ForecastError, RecordingError, StoreError
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.codes import MemoryPoint
from fsdp_inspect.trace.tables import MemoryTable
from instrumented_trainer.forecasting import build
from tests.cases import chosen_cases, mark_slow
from tests.distributed.memory_plans import MODEL, PLANS, describe, train_plans

WORLD_SIZE = 4
QUICK = ("half", "recomputed")


@pytest.fixture(scope="module")
def emulated(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, Any]:
    """The memory of real tensors by plan: rank 0 of four emulated ranks."""
    folder = tmp_path_factory.mktemp("emulated")
    plans = tuple(filter(chosen_cases(request, "plan"), PLANS))
    train_plans(folder, plans, f"world_size={WORLD_SIZE},bandwidth=10GB/s")
    return {plan: json.loads((folder / f"{plan}.json").read_text()) for plan in plans}


@pytest.mark.parametrize("plan", mark_slow(PLANS, but=QUICK))
def test_the_peak_is_that_of_real_tensors(
    emulated: dict[str, Any], tmp_path: Path, plan: str
) -> None:
    settings = {"param_dtype": "auto", **MODEL, **PLANS[plan]}

    path = forecast_memory(
        build, tmp_path / "f", world_size=WORLD_SIZE, device_type="cpu", settings=settings
    )

    forecast = describe(open_run(path).memory(0))
    assert peaks_of(forecast) == peaks_of(emulated[plan])
    assert max(forecast["peak_allocated"]) == max(emulated[plan]["peak_allocated"]) > 0


def peaks_of(samples: dict[str, list[int]]) -> list[dict[str, int]]:
    """The rows that describe the peak: its position, and the live bytes by category.

    Only a recorder sees the data phase of the trainer. Without it, the 4 bytes of the running loss
    count as input instead of temporary.
    """
    rows = [dict(zip(samples, row, strict=True)) for row in zip(*samples.values(), strict=True)]
    for row in rows:
        row["temporary"] += row.pop("input")
    return [row for row in rows if row["point"] in (MemoryPoint.PEAK, MemoryPoint.PEAK_BY_OWNER)]


class Layers(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def build_layers(width: int = 1 << 16, *, shard: bool = True) -> ForecastTarget:
    """Three layers of 16 GiB each in float32, which do not fit on a test machine."""
    model = Layers(width)
    for layer in model.layers if shard else ():
        fully_shard(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.zeros(1, width)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return ForecastTarget(model=model, step=step, optimizer=optimizer)


def test_a_model_that_no_machine_here_could_hold_is_forecast(tmp_path: Path) -> None:
    layer = 4 * (1 << 32)

    path = forecast_memory(build_layers, tmp_path / "big", world_size=64)

    memory = measure_memory(open_run(path))
    held = {one.category: one.bytes for one in memory.peak.categories}
    assert held["sharded_parameter"] == 3 * layer // 64
    assert held["unsharded_parameter"] == layer
    assert held["unsharded_gradient"] == layer
    assert held["reduce_scatter_buffer"] == 2 * layer  # the one in flight and the next one


def test_a_forecast_says_what_it_is_and_what_it_leaves_out(tmp_path: Path) -> None:
    path = forecast_memory(build_layers, tmp_path / "small", world_size=8, settings={"width": 16})

    run = open_run(path)
    assert run.manifest.source == "predicted"
    assert run.manifest.config == {"width": 16, "shard": True}
    assert run.manifest.world_size == 8
    assert any("fragmentation" in note for note in run.manifest.notes)
    assert len(run.events(0)) == 0


def test_two_forecasts_are_alike_to_the_byte(tmp_path: Path) -> None:
    first, second = (
        forecast_memory(build_layers, tmp_path / name, world_size=8, settings={"width": 64})
        for name in ("first", "second")
    )

    assert describe(open_run(first).memory(0)) == describe(open_run(second).memory(0))


@pytest.mark.slow
def test_fewer_ranks_hold_more(tmp_path: Path) -> None:
    peaks = [
        measure_memory(
            open_run(
                forecast_memory(
                    build_layers, tmp_path / str(ranks), world_size=ranks, settings={"width": 256}
                )
            )
        ).peak_allocated_bytes
        for ranks in (2, 4, 8)
    ]

    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == 3


def test_a_model_without_units_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="fully_shard was never called"):
        forecast_memory(
            build_layers, tmp_path / "x", world_size=2, settings={"width": 8, "shard": False}
        )
    assert not (tmp_path / "x").exists()


def test_a_builder_with_ddp_is_refused_by_its_name(tmp_path: Path) -> None:
    def build_ddp() -> ForecastTarget:
        model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
        return ForecastTarget(model=model, step=lambda: None)

    with pytest.raises(RecordingError, match=r"uses DistributedDataParallel \(DDP\)\. A forecast"):
        forecast_memory(build_ddp, tmp_path / "x", world_size=2, device_type="cpu")


def test_a_step_that_fails_is_said_in_its_own_words(tmp_path: Path) -> None:
    def build_broken() -> ForecastTarget:
        target = build_layers(8)

        def step() -> None:
            raise ValueError("the batch is empty")

        return ForecastTarget(model=target.model, step=step)

    with pytest.raises(ForecastError, match=r"ValueError: the batch is empty.*Expected"):
        forecast_memory(build_broken, tmp_path / "x", world_size=2)


def test_a_folder_that_is_taken_stays(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()

    with pytest.raises(StoreError, match="already exists"):
        forecast_memory(build_layers, tmp_path / "x", world_size=2, settings={"width": 8})


def test_the_columns_are_those_of_every_memory_table(tmp_path: Path) -> None:
    path = forecast_memory(build_layers, tmp_path / "x", world_size=2, settings={"width": 8})

    assert isinstance(open_run(path).memory(0), MemoryTable)


@pytest.mark.parametrize("error", [SystemExit(0), SystemExit(3), GeneratorExit("end")], ids=repr)
def test_a_builder_that_exits_is_an_error(tmp_path: Path, error: BaseException) -> None:
    def exiting() -> ForecastTarget:
        raise error

    with pytest.raises(ForecastError, match=f"{type(error).__name__}: {error}"):
        forecast_memory(exiting, tmp_path / "run", world_size=2)
    assert not (tmp_path / "run").exists()
