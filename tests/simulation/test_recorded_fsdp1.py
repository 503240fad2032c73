"""A run of FSDP1 on streams predicts other settings, with torch's FSDP1 and our recorder.

The device and its clock are virtual. The prediction is compared with torch, which runs the other
setting on the same device.
"""

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_inspect.simulation.changes import Changes
from tests.studies.validation.fsdp1_schedule import SETTINGS, SPEEDS, predict, step_ns, train

Speed = tuple[float, float, float]


@pytest.fixture(scope="module", autouse=True)
def fake_process_group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("speed", SPEEDS, ids=str)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_of_fsdp1_plays_again_in_its_own_time(speed: Speed, name: str) -> None:
    run = train(speed, name, 2)
    assert predict(run, Changes()) == pytest.approx(step_ns(run), rel=0.005)


@pytest.mark.parametrize("speed", SPEEDS, ids=str)
@pytest.mark.parametrize("name", SETTINGS)
def test_another_setting_takes_what_torch_takes_with_it(speed: Speed, name: str) -> None:
    count = 2 if name == "`no_sync`" else 1
    predicted = predict(train(speed, "as recorded", count), SETTINGS[name][0])
    assert predicted == pytest.approx(step_ns(train(speed, name, count)), rel=0.01)
