"""Units without trained parameters are watched for changes, which no backward lets them gather."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_inspect.recording.clocks import HostClock
from fsdp_inspect.recording.late_values import LateValues
from fsdp_inspect.recording.stale_watch import StaleWatch
from fsdp_inspect.recording.torch_api import fsdp2


def average(model: nn.Module) -> None:
    for each in model.parameters():
        each.lerp_(torch.ones_like(each), 0.5)


def average_data(model: nn.Module) -> None:
    for each in model.parameters():
        each.data.mul_(2)


def load(model: nn.Module) -> None:
    model.load_state_dict({name: 2 * each for name, each in model.state_dict().items()})


@pytest.mark.parametrize("change", [average, average_data, load])
def test_a_change_of_frozen_parameters_is_seen_once(
    fake_world_of_4: None, change: Callable[[nn.Module], None]
) -> None:
    model = fully_shard(nn.Sequential(nn.Linear(8, 8))).requires_grad_(requires_grad=False)
    watch = StaleWatch(fsdp2.find_groups(model), LateValues(HostClock()))
    watch.before_backward()
    first = watch.take_news()
    assert first is not None
    assert (first.num_looks, first.changed) == (1, [])
    watch.look_at_frozen()
    assert watch.take_news() is None

    with torch.no_grad():
        change(model)
    watch.look_at_frozen()

    seen = watch.take_news()
    assert seen is not None
    assert seen.changed == [0]
    assert watch.take_news() is None


def test_trained_units_are_not_watched_for_changes(fake_world_of_4: None) -> None:
    model = fully_shard(nn.Sequential(nn.Linear(8, 8)))
    watch = StaleWatch(fsdp2.find_groups(model), LateValues(HostClock()))
    watch.before_backward()
    with torch.no_grad():
        average(model)
    watch.look_at_frozen()
    seen = watch.take_news()
    assert seen is not None
    assert seen.changed == []
