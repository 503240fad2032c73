from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_inspect.errors import PlanError
from fsdp_inspect.recording.torch_api.checkpointing import (
    apply_checkpointing,
    observe_checkpointing,
)
from fsdp_inspect.trace.plan import Checkpointing

pytestmark = pytest.mark.filterwarnings(  # torch's own, at import
    "ignore:.torch.jit:DeprecationWarning"
)
BLOCKS = ("layers.0", "layers.1", "layers.2")


class MatrixProducts(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func == torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


def products_in_backward(model: torch.nn.Module, tokens: torch.Tensor) -> int:
    output = model(tokens)
    with MatrixProducts() as counter:
        output.sum().backward()
    return counter.count


@pytest.mark.parametrize(
    ("checkpointing", "expected"),
    [
        (Checkpointing(), 14),  # two for each of seven projections
        # two of each block again; torch stops before the last one, whose result is unused
        (Checkpointing(full=BLOCKS), 14 + 3),
        (Checkpointing(selective=BLOCKS), 14),
    ],
    ids=["none", "full", "selective"],
)
def test_full_repeats_matrix_products_and_selective_keeps_them(
    decoder, tokens, checkpointing, expected
):
    apply_checkpointing(decoder, checkpointing)
    assert products_in_backward(decoder, tokens) == expected


def test_gradients_are_the_same_however_much_is_recomputed(decoder, tokens):
    decoder(tokens).sum().backward()
    expected = {name: p.grad.clone() for name, p in decoder.named_parameters()}
    decoder.zero_grad()
    apply_checkpointing(decoder, Checkpointing(full=BLOCKS[:1], selective=BLOCKS[1:]))
    decoder(tokens).sum().backward()
    for (_, parameter), gradient in zip(decoder.named_parameters(), expected.values(), strict=True):
        assert torch.equal(parameter.grad, gradient)


@pytest.mark.parametrize("name", ["", "layers.9"])
def test_a_module_that_cannot_be_wrapped_is_refused_before_any_is(decoder, name):
    with pytest.raises(PlanError, match=f"Checkpointing contains the module '{name}'"):
        apply_checkpointing(decoder, Checkpointing(full=("layers.0", name)))
    assert observe_checkpointing(decoder) == Checkpointing()


def test_what_was_applied_is_observed_and_applied_once(decoder):
    checkpointing = Checkpointing(full=("layers.0",), selective=("layers.1", "layers.2.ffn"))
    apply_checkpointing(decoder, checkpointing)
    apply_checkpointing(decoder, checkpointing)
    assert observe_checkpointing(decoder) == checkpointing
    names = [name for name, _ in decoder.named_modules() if "_checkpoint_wrapped_module" in name]
    assert not any(name.count("_checkpoint_wrapped_module") > 1 for name in names)
