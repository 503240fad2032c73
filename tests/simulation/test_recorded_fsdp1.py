"""A run of FSDP1 on streams predicts other settings, with torch's FSDP1 and our recorder.

The device and its clock are virtual. The prediction is compared with torch, which runs the other
setting on the same device.
"""

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_inspect.simulation.changes import Changes
from tests.studies.validation.fsdp1_schedule import (
    SETTINGS,
    SPEEDS,
    predict,
    predict_setting,
    step_ns,
    train,
)

Speed = tuple[float, float, float]


@pytest.fixture(scope="module", autouse=True)
def fake_process_group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("speed", SPEEDS, ids=str)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_of_fsdp1_plays_again_in_its_own_time(speed: Speed, name: str) -> None:
    run = train(speed, name, 2 if name == "`no_sync`" else 1)
    assert predict(run, Changes()) == pytest.approx(step_ns(run), rel=0.002)


@pytest.mark.parametrize("speed", SPEEDS, ids=str)
@pytest.mark.parametrize("name", SETTINGS)
def test_another_setting_takes_what_torch_takes_with_it(speed: Speed, name: str) -> None:
    predicted, measured = predict_setting(speed, name)
    assert predicted == pytest.approx(measured, rel=0.002)


BACK = Changes(
    reshard_after_forward=True,
    forward_prefetch=0,
    backward_prefetch="BACKWARD_PRE",
    limit_all_gathers=True,
)


@pytest.mark.parametrize("speed", SPEEDS, ids=str)
@pytest.mark.parametrize("name", ["`SHARD_GRAD_OP`", "both prefetches, no limit"])
def test_the_default_settings_are_predicted_from_other_ones(speed: Speed, name: str) -> None:
    measured = step_ns(train(speed, "as recorded"))
    assert predict(train(speed, name), BACK) == pytest.approx(measured, rel=0.002)
