"""Quick fake tensors tell apart, and find, the same cached operations as torch's own."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch._dynamo
from hypothesis import given, strategies as st

from fsdp_inspect.emulation.forecast.forecast import forecast_memory
from fsdp_inspect.recording.torch_api.dispatch import (
    DEVICE_QUERY,
    FakeTensorMode,
    QuickFakeTensorMode,
    device_of_fake,
)

PROPERTIES: Mapping[str, tuple[Any, ...]] = {
    "shape": ((2, 3), (3, 2), (2, 2), (6,), (2, 3, 1)),
    "dtype": (torch.float32, torch.bfloat16, torch.complex64, torch.int64),
    "view": ("whole", "transposed", "offset", "conjugate", "negative", "imaginary"),
    "device": ("cpu", "cuda:0"),
    "requires_grad": (False, True),
    "inference": (False, True),
}
TENSORS = st.fixed_dictionaries({name: st.sampled_from(of) for name, of in PROPERTIES.items()})
PLAIN = st.sampled_from([1, 1.0, True, None, "sum", torch.float32, (1, 2), [1, 2], {"dim": 1}])


def make(of: Mapping[str, Any]) -> torch.Tensor:
    """A tensor with these properties, under the active mode."""
    with torch.inference_mode(of["inference"]):
        tensor = torch.empty(of["shape"], dtype=of["dtype"], device=of["device"])
        if of["view"] == "transposed":
            tensor = tensor.transpose(0, -1)
        elif of["view"] == "offset":
            tensor = tensor.narrow(0, 1, len(tensor) - 1)  # an index asks for a CUDA device
        elif of["view"] == "imaginary" and tensor.is_complex():
            tensor = tensor.imag
        elif of["view"] == "conjugate":
            tensor = torch.conj(tensor)
        elif of["view"] == "negative" and tensor.is_complex():
            tensor = torch.conj(tensor).imag
    differentiable = tensor.is_floating_point() or tensor.is_complex()
    if of["requires_grad"] and differentiable and not of["inference"]:
        tensor = tensor.detach().requires_grad_()
    return tensor


def key_of(mode: FakeTensorMode, values: object) -> tuple[object, ...]:
    """What a mode keeps a cached operation by."""
    result: list[object] = []
    mode._prep_args_for_hash(result, values, None, [])
    return tuple(result)


@given(*[st.lists(st.one_of(TENSORS, PLAIN), max_size=2)] * 2)
def test_arguments_are_told_apart_as_torch_tells_them_apart(
    first: list[Any], second: list[Any]
) -> None:
    is_equal = []
    for kind in (FakeTensorMode, QuickFakeTensorMode):
        with kind() as mode:
            calls = [
                [
                    make(value) if isinstance(value, dict) and "view" in value else value
                    for value in call
                ]
                for call in (first, second)
            ]
        one, other = (key_of(mode, call) for call in calls)
        is_equal.append(one == other)
        assert not is_equal[-1] or hash(one) == hash(other)
    assert is_equal[0] == is_equal[1]


@pytest.mark.parametrize("name", PROPERTIES)
def test_tensors_that_differ_in_one_property_are_told_apart(name: str) -> None:
    usual = {each: values[0] for each, values in PROPERTIES.items()}
    if name == "view":
        usual |= {"shape": (2, 2), "dtype": torch.complex64}
    with QuickFakeTensorMode() as mode:
        keys = {key_of(mode, [make(usual | {name: value})]) for value in PROPERTIES[name]}
    assert len(keys) == len(PROPERTIES[name])


def test_a_device_is_answered_as_torch_answers_it() -> None:
    with QuickFakeTensorMode():
        for device in ("cpu", "cuda:0", "meta"):
            tensor = torch.empty(2, device=device)
            assert device_of_fake(tensor) == DEVICE_QUERY(tensor) == torch.device(device)
    assert device_of_fake(torch.empty(2)) == torch.device("cpu")


def test_torch_checks_each_cached_operation_of_a_forecast(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    from instrumented_trainer.forecasting import build

    checked = 0
    check = FakeTensorMode._crosscheck_cache_output

    def count(mode: FakeTensorMode, *call: Any) -> None:
        nonlocal checked
        checked += 1
        check(mode, *call)

    monkeypatch.setattr(FakeTensorMode, "_crosscheck_cache_output", count)
    with torch._dynamo.config.patch(fake_tensor_cache_crosscheck_enabled=True):
        forecast_memory(build, tmp_path / "run", world_size=4, settings={"preset": "tiny"})
    assert checked > 100


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize("operator", [torch.Tensor.t, torch.Tensor.exp])
def test_a_tensor_of_a_kept_shape_is_like_one_that_torch_makes(operator: Any, device: str) -> None:
    with QuickFakeTensorMode():
        argument = torch.empty(2, 3, device=device)
        made = operator(argument)
        before = FakeTensorMode.cache_info().hits
        kept = operator(argument)
        assert FakeTensorMode.cache_info().hits == before + 1
        assert vars(kept) == vars(made)
        assert (kept.device, kept.stride()) == (made.device, made.stride())
        assert torch._C._dispatch_keys(kept) == torch._C._dispatch_keys(made)
        shared = [each.untyped_storage()._cdata for each in (argument, made, kept)]
        assert len(set(shared)) == (3 if operator is torch.Tensor.exp else 1)
        assert kept.data_ptr() == made.data_ptr() == 0  # `copy.deepcopy` asks
