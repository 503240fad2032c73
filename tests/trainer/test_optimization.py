from itertools import pairwise

import pytest
import torch
from torch import nn

from instrumented_trainer.command_line import check_settings
from instrumented_trainer.optimization import clip_gradients, learning_rate, make_optimizer


def rates(**settings: object) -> list[float]:
    config = check_settings({"lr": 1.0, "steps": 10, "lr_warmup": 2, **settings})
    return [learning_rate(step, config) for step in range(10)]


def test_the_learning_rate_rises_in_equal_parts_to_its_peak():
    assert rates(lr_warmup=4)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_the_learning_rate_falls_to_its_least_at_the_last_step(schedule):
    values = rates(schedule=schedule, min_lr_ratio=0.1)
    assert values[-1] == pytest.approx(0.1)
    assert values[2:] == sorted(values[2:], reverse=True)


def test_a_linear_schedule_falls_by_the_same_each_step():
    values = rates(schedule="linear", min_lr_ratio=0.0)[2:]
    assert [a - b for a, b in pairwise(values)] == pytest.approx([1 / 7] * 7)


def test_a_constant_schedule_stays_at_the_peak():
    assert rates(schedule="constant")[2:] == [1.0] * 8


def test_a_run_of_warm_up_alone_never_divides_by_zero():
    assert rates(lr_warmup=10)[-1] == 1.0
    assert rates(lr_warmup=9)[-1] == 1.0


def test_matrices_decay_and_vectors_do_not():
    model = nn.Linear(3, 3)
    matrices, vectors = make_optimizer(model, check_settings({"lr": 1.0})).param_groups
    assert (matrices["params"], matrices["weight_decay"]) == ([model.weight], 0.1)
    assert (vectors["params"], vectors["weight_decay"]) == ([model.bias], 0.0)


def test_gradients_are_scaled_to_the_greatest_norm_and_the_old_one_returned():
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    assert clip_gradients([parameter], 1.0) == pytest.approx(5.0)
    assert parameter.grad.norm() == pytest.approx(1.0, abs=1e-4)
