"""The mode of a model is followed by its modules that the mode changes."""

import pytest
import torch
from torch import nn

from fsdp_inspect.recording.mode_watch import ModeWatch
from fsdp_inspect.recording.models import Models
from fsdp_inspect.trace.correctness import ModeSeen


class Net(nn.Sequential):
    def __init__(self, *, rate: float = 0.1, norm: bool = True) -> None:
        layers = (nn.Linear(4, 4), nn.Dropout(rate), *([nn.BatchNorm1d(4)] if norm else ()))
        super().__init__(*layers)
        self(torch.randn(3, 4)).sum().backward()


def follow(model: nn.Module, modes: str) -> ModeSeen:
    """Updates in training mode (`t`), with frozen statistics (`f`), or in evaluation mode (`e`)."""
    watch = ModeWatch(model)
    for step, mode in enumerate(modes):
        model.train(mode != "e")
        if mode == "f":
            model[-1].eval()
        watch.note_update(step)
    [seen] = watch.seen
    return seen


@pytest.mark.parametrize(
    ("modes", "num_on", "since", "num_off"),
    [
        ("ttteee", 3, 3, 3),
        ("ttteeet", 4, None, 0),
        ("e" * 20, 0, 0, 8),
        ("t" * 20 + "e", 8, 20, 1),
        ("etee", 1, 2, 2),
        ("fff", 3, None, 0),
    ],
)
def test_updates_in_evaluation_mode_are_counted_from_the_last_change(
    modes: str, num_on: int, since: int | None, num_off: int
) -> None:
    seen = follow(Net(), modes)

    assert (seen.num_on, seen.since, seen.num_off) == (num_on, since, num_off)


def test_what_is_off_is_stated() -> None:
    seen = follow(Net(rate=0.25), "te")

    assert (seen.num_dropouts, seen.largest_dropout, seen.num_batch_norms) == (1, 0.25, 1)


@pytest.mark.parametrize("modes", ["ttff", "ffff"])
def test_frozen_statistics_are_no_evaluation_mode(modes: str) -> None:
    assert follow(Net(rate=0.0), modes).since is None


def test_without_gradients_nothing_is_noted() -> None:
    model = Net()
    model.zero_grad()

    assert follow(model, "teee").since is None


def test_a_mode_without_effect_is_not_followed() -> None:
    assert follow(Net(rate=0.0, norm=False), "teee").since is None
    assert ModeWatch(nn.Linear(2, 2)).seen == []


def test_each_of_several_models_has_its_mode() -> None:
    first, second = Net(), Net()
    watch = ModeWatch(Models({"first": first, "second": second}))

    second.eval()
    watch.note_update(3)

    assert [each.since for each in watch.seen] == [None, 3]


def test_only_changes_are_news() -> None:
    watch = ModeWatch(Net())

    news = [watch.note_update(step) for step in range(10)]

    assert news == [True] * 8 + [False] * 2
