"""Forecasts of common models are exact to the byte and state what is unknown."""

import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fsdp_inspect import ForecastTarget, Recorder, forecast_memory
from fsdp_inspect.analysis.memory.peak import Memory, measure_memory
from fsdp_inspect.emulation.forecast.fake_values import describe_user_line
from fsdp_inspect.emulation.network import Link, Specification
from fsdp_inspect.emulation.process import emulate
from fsdp_inspect.errors import ForecastError
from fsdp_inspect.store.reader import open_run
from tests.cases import mark_slow
from tests.emulation.forecast import plain_models

WORLD_SIZE = 4
QUICK = (plain_models.experts_in_float32, plain_models.optimizer_in_backward)
FREE = Link(bandwidth_bytes_per_s=float("inf"), latency_ns=0)
Build = Callable[[], ForecastTarget]


def forecast(build: Build, path: Path, device_type: str = "cuda") -> Memory:
    forecast_memory(build, path, world_size=WORLD_SIZE, device_type=device_type)
    return measure_memory(open_run(path))


def record(build: Build, path: Path) -> Memory:
    """Record two steps on real tensors, as rank 0 of emulated ranks."""
    ranks = Specification(world_size=WORLD_SIZE, gpus_per_node=WORLD_SIZE, intra=FREE, inter=FREE)
    quiet = {"print_verdict": False, "device_interval_s": 0.0}
    with emulate(ranks):
        dist.init_process_group()
        made = build()
        with Recorder(
            made.model, optimizer=made.optimizer, path=path, warmup_steps=1, **quiet
        ) as recorder:
            for _ in range(2):
                with recorder.step():
                    made.step()
        dist.destroy_process_group()
    return measure_memory(open_run(path))


@pytest.mark.parametrize(
    "build", mark_slow(plain_models.ALIKE, but=QUICK), ids=lambda build: build.__name__
)
def test_real_tensors_take_what_the_forecast_says(build: Build, tmp_path: Path) -> None:
    predicted = forecast(build, tmp_path / "forecast", device_type="cpu")
    recorded = record(build, tmp_path / "recorded")

    assert predicted.peak_allocated_bytes == recorded.peak_allocated_bytes
    assert predicted.peak.categories == recorded.peak.categories
    assert predicted.ranks[0].resting_bytes == recorded.ranks[0].resting_bytes


def test_a_value_that_nobody_knows_is_0_and_the_reader_learns_where_it_was_asked(
    tmp_path: Path,
) -> None:
    forecast(plain_models.values_asked, tmp_path / "asked")

    (note,) = (one for one in open_run(tmp_path / "asked").manifest.notes if "was read" in one)
    assert "plain_models.py:" in note
    assert "returned 0" in note


def test_a_size_that_depends_on_values_is_refused_with_the_line(tmp_path: Path) -> None:
    with pytest.raises(ForecastError, match=r"at step, .*plain_models\.py:\d+") as raised:
        forecast(plain_models.sizes_by_value, tmp_path / "x")
    assert "no shape depends on the values of a tensor" in str(raised.value)


def test_code_of_this_package_is_never_named_as_the_users() -> None:
    frames = traceback.StackSummary.from_list(
        [
            ("/home/user/train.py", 30, "step", None),
            (open_run.__code__.co_filename, 137, "read", None),
        ]
    )
    assert describe_user_line(frames) == "step, /home/user/train.py:30"


def test_what_is_offloaded_is_not_the_devices_memory(tmp_path: Path) -> None:
    kept = forecast(plain_models.plain, tmp_path / "kept")
    offloaded = forecast(plain_models.offloaded, tmp_path / "offloaded")

    on_host = ("sharded_parameter", "sharded_gradient", "optimizer_state")
    before, after = (
        {one.category: one.bytes for one in memory.peak.categories} for memory in (kept, offloaded)
    )
    assert after == {name: held for name, held in before.items() if name not in on_host}
    assert offloaded.ranks[0].resting_bytes == before["buffer"] + before["input"]
    assert any("Offloaded tensors" in note for note in open_run(tmp_path / "offloaded").notes)

    host = open_run(tmp_path / "offloaded").manifest.host_memory
    states = before["sharded_parameter"] + before["optimizer_state"]
    assert host.offloaded_bytes == states + before["sharded_parameter"]  # gradients: as parameters
    num_parameters = open_run(tmp_path / "kept").manifest.model.num_parameters
    assert host.whole_model_bytes == 4 * num_parameters + before["buffer"]
    assert open_run(tmp_path / "kept").manifest.host_memory.offloaded_bytes == 0


@pytest.mark.slow
def test_on_a_cpu_offloading_moves_nothing(tmp_path: Path) -> None:
    kept = forecast(plain_models.plain, tmp_path / "kept", "cpu")
    offloaded = forecast(plain_models.offloaded, tmp_path / "offloaded", "cpu")

    assert offloaded.peak_allocated_bytes == kept.peak_allocated_bytes
    manifest = open_run(tmp_path / "offloaded").manifest
    assert manifest.host_memory is None
    assert any("pin_memory, ends such a training" in note for note in manifest.notes)


@pytest.mark.slow
def test_code_that_says_cuda_is_forecast_like_code_that_does_not(tmp_path: Path) -> None:
    before = torch.cuda.set_device, torch.autocast.__init__, dist.init_process_group

    plain = forecast(plain_models.plain, tmp_path / "plain")
    cuda = forecast(plain_models.written_for_cuda, tmp_path / "cuda")

    assert cuda.peak_allocated_bytes == plain.peak_allocated_bytes
    assert cuda.peak.categories == plain.peak.categories
    assert before == (torch.cuda.set_device, torch.autocast.__init__, dist.init_process_group)
    assert torch.device("cuda", 0).index == 0
