"""A known value of a fake tensor equals the value of the real tensor."""

from collections.abc import Callable

import torch
from hypothesis import given, strategies as st

from fsdp_inspect.emulation.forecast.fake_values import ValuelessTensors

Operation = Callable[[torch.Tensor], torch.Tensor]

CREATED = (
    lambda: torch.ones(3, 4),
    lambda: torch.zeros(3, 4, dtype=torch.int64),
    lambda: torch.full((3, 4), 7.0),
    lambda: torch.arange(12.0).reshape(3, 4),
)


def hide_first(tensor: torch.Tensor) -> torch.Tensor:
    tensor[..., :1] = 0
    return tensor


OPERATIONS: tuple[Operation, ...] = (
    lambda tensor: tensor.to(torch.bool),
    lambda tensor: tensor.to(torch.float32),
    lambda tensor: tensor[..., :1],
    lambda tensor: tensor[None],
    lambda tensor: tensor.expand(2, *tensor.shape),
    lambda tensor: tensor.clone(),
    lambda tensor: tensor == 1,
    lambda tensor: tensor != 0,
    lambda tensor: tensor.logical_not(),
    lambda tensor: tensor.all(),
    lambda tensor: tensor.any(),
    lambda tensor: tensor.sum(),
    lambda tensor: tensor + 1,
    lambda tensor: tensor.bool().reshape(-1),
    lambda tensor: hide_first(tensor.clone()),
    lambda tensor: (hide_first(tensor.clone()[None]), tensor)[1],
)


@given(st.integers(0, len(CREATED) - 1), st.lists(st.integers(0, len(OPERATIONS) - 1), max_size=6))
def test_a_known_value_is_that_of_every_element(created: int, operations: list[int]) -> None:
    fake = ValuelessTensors()
    real = CREATED[created]()
    with fake:
        tensor = CREATED[created]()
    for number in operations:
        if real.dim() == 0:
            break
        real = OPERATIONS[number](real)
        with fake:
            tensor = OPERATIONS[number](tensor)
        value = fake.values.find(tensor)
        assert value is None or (real == value).all()


def test_a_test_of_a_mask_of_ones_reads_no_unknown_value() -> None:
    with ValuelessTensors() as fake:
        mask = torch.ones(2, 5)
        assert mask.to(torch.bool)[:, :5].all()
        assert mask.sum() == mask.numel()
    assert fake.num_asked == 0


def test_a_tensor_that_changed_in_place_is_unknown() -> None:
    with ValuelessTensors() as fake:
        mask = torch.ones(2, 5)
        mask[0, 1] = 0
        assert fake.values.find(mask) is None
        assert not mask.all()
    assert fake.num_asked == 1
