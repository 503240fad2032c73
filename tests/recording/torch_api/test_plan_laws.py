"""Properties of plans over random models: observed, applied to a copy, and observed again."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_inspect.recording.torch_api import fsdp2
from fsdp_inspect.recording.torch_api.apply import apply_plan
from fsdp_inspect.recording.torch_api.observe import observe_plan
from fsdp_inspect.trace.plan import Plan
from tests.cases import examples
from tests.torch_versions import needs_torch

WIDTH = 8
COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")


@dataclass(frozen=True)
class Tree:
    """A module with its own layer and modules inside it."""

    parts: tuple["Tree", ...] = ()
    in_dict: bool = False
    """Whether the parts are in a ModuleDict, which has no forward."""


class Node(nn.Module):
    def __init__(self, tree: Tree) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        parts = [Node(part) for part in tree.parts]
        named = {f"part{number}": part for number, part in enumerate(parts)}
        self.parts: Any = nn.ModuleDict(named) if tree.in_dict else nn.ModuleList(parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        for part in self.parts.values() if isinstance(self.parts, nn.ModuleDict) else self.parts:
            x = part(x)
        return x


TREES = st.recursive(
    st.just(Tree()),
    lambda inner: st.builds(
        Tree, parts=st.lists(inner, min_size=1, max_size=3).map(tuple), in_dict=st.booleans()
    ),
    max_leaves=6,
)


@st.composite
def plans(draw: st.DrawFn, tree: Tree) -> Plan:
    """Any modules with a forward are units, with any settings; the root may be a unit."""
    modules = dict(Node(tree).named_modules())
    names = [name for name, module in modules.items() if isinstance(module, Node)]
    chosen = draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    units = [
        {
            "modules": [name],
            "reshard_after_forward": draw(st.sampled_from(["auto", True, False])),
            "mesh": draw(st.sampled_from(MESHES)),
        }
        for name in chosen
    ]
    for unit in units:
        if unit["mesh"] == {"replicate": 4}:
            # Torch (2.13) runs no sharded unit inside a replicated one, and does not reshard them.
            is_leaf = not len(modules[unit["modules"][0]].parts)
            unit |= {"reshard_after_forward": "auto"}
            unit["mesh"] = unit["mesh"] if is_leaf else {}
    return Plan.from_dict(
        {
            "units": [_without_auto(unit) for unit in units],
            "world_size": 4,
            "mesh": draw(st.sampled_from([{"shard": 4}, {"shard": 2}])),
        }
    )


MESHES: list[dict[str, int]] = [
    {},
    {},
    {"shard": 2},
    {"shard": 4},
    {"replicate": 2, "shard": 2},
    {"replicate": 4},
]


def _without_auto(unit: dict[str, Any]) -> dict[str, Any]:
    return {name: None if value == "auto" else value for name, value in unit.items()}


@pytest.fixture(scope="module")
def meshes() -> Iterator[list[DeviceMesh]]:
    """All ranks, two neighbours (rank 0 and 1), and replicas of them."""
    dist.init_process_group("fake", rank=0, world_size=4)
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    yield [init_device_mesh("cpu", (4,)), both["inner"], both]
    dist.destroy_process_group()


@contextmanager
def collectives_of() -> Iterator[list[tuple[str, int, int]]]:
    """The name, the ranks and the elements of each collective."""
    found: list[tuple[str, int, int]] = []

    def noting(name: str) -> Any:
        original = getattr(dist, name)

        def noted(*args: Any, **options: Any) -> Any:
            tensors = [x for x in (*args, *options.values()) if isinstance(x, torch.Tensor)]
            ranks = dist.get_world_size(options["group"])
            found.append((name, ranks, max(tensor.numel() for tensor in tensors)))
            return original(*args, **options)

        return noted

    with patch.multiple(dist, **{name: noting(name) for name in COLLECTIVES}):
        yield found


def run_of(model: nn.Module) -> list[tuple[str, int, int]]:
    with collectives_of() as found:
        for _ in range(2):
            model(torch.ones(2, WIDTH)).sum().backward()
    return found


def sizes_of(model: nn.Module) -> list[tuple[str, dict[str, int], dict[str, list[int]]]]:
    return [
        (handle.name, fsdp2.mesh_sizes(handle.group), fsdp2.parameter_shapes(handle))
        for handle in fsdp2.find_groups(model)
    ]


@pytest.mark.filterwarnings("ignore:Unit .* holds only vectors")
@given(data=st.data(), tree=TREES)
@settings(max_examples=examples(100), deadline=None)
def test_an_observed_plan_gives_a_copy_the_same_units_sizes_and_collectives(
    meshes: list[DeviceMesh], data: st.DataObject, tree: Tree
):
    needs_torch("2.13", "lacks settings of plans")
    first, second = Node(tree), Node(tree)
    apply_plan(first, data.draw(plans(tree)), meshes)
    observed = observe_plan(first)
    apply_plan(second, Plan.from_toml(observed.to_toml()), meshes)
    assert observe_plan(second) == observed
    assert sizes_of(second) == sizes_of(first)
    assert run_of(second) == run_of(first)
