"""Is only that called a cause which can have done it?"""

from typing import Any

import pytest

from fsdp_inspect.checks.causes import find_causes
from fsdp_inspect.checks.increases import Increase
from fsdp_inspect.trace.run import RunManifest
from tests.builders import RunBuilder

ACTIVATIONS = [Increase("activation", ("layers.0",), 10, 20)]


def manifest(unit: dict[str, Any] | None = None, **settings: Any) -> RunManifest:
    builder = RunBuilder(("layers.0", "layers.1", "layers.2"), world_size=4, **settings)
    for fqn in builder.units:
        builder.unit(fqn, **(unit or {}))
    builder.rank(0)
    return builder.build().manifest


def causes(before: RunManifest, after: RunManifest, *, of_memory: bool = True) -> list[str]:
    return list(find_causes(before, after, ACTIVATIONS, of_memory=of_memory, of_time=not of_memory))


KEPT, FREED, PARTLY = ({"reshard_after_forward": value} for value in (False, True, 2))


@pytest.mark.parametrize(
    ("before", "after", "of_memory", "words"),
    [
        (FREED, KEPT, True, "`layers.*` now reshard_after_forward=False: +3 unsharded blocks"),
        (FREED, PARTLY, True, "now reshard_after_forward=2: 3 blocks sharded over only 2 ranks"),
        (KEPT, FREED, False, "now reshard_after_forward=True: backward gathers them again"),
        (KEPT, PARTLY, False, "now reshard_after_forward=2: backward gathers them again"),
    ],
    ids=["kept", "kept in part", "gathered again", "gathered again in part"],
)
def test_resharding_is_a_cause_of_what_it_costs(
    before: dict[str, Any], after: dict[str, Any], of_memory: bool, words: str
) -> None:
    found = causes(manifest(before), manifest(after), of_memory=of_memory)

    assert words in found[0]


def test_what_frees_memory_is_no_cause_of_more_of_it() -> None:
    (found,) = causes(manifest(KEPT), manifest(FREED))

    assert found.startswith("activations of layers.0 stay allocated")


def test_a_narrower_dtype_is_no_cause_of_more_memory() -> None:
    wide, narrow = ({"reduce_dtype": dtype} for dtype in ("float32", "bfloat16"))

    (wider,) = causes(manifest(narrow), manifest(wide))
    assert "now reduce_dtype=float32 instead of bfloat16" in wider
    (other,) = causes(manifest(wide), manifest(narrow))
    assert "stay allocated" in other


def test_a_larger_batch_is_the_cause_and_no_leak_is_suspected() -> None:
    small, large = (manifest(config={"batch_size": size, "lr": size}) for size in (1, 2))

    assert causes(small, large) == ["batch_size is 2 instead of 1"]


def test_a_larger_model_is_said_in_parameters() -> None:
    small = manifest()
    model = small.model.model_copy(update={"num_parameters": 1400})

    assert causes(small, small.model_copy(update={"model": model})) == [
        "the model has 1,400 parameters instead of 300"
    ]
