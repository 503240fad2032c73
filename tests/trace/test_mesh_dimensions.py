"""The dimension of process groups: the rules, their order, and unknown dimensions."""

import pytest

from fsdp_inspect.trace.mesh_dimensions import (
    MeshDimension,
    find_coordinates,
    find_dimensions,
    order_labels,
    usual_dimension,
    with_labels,
)
from fsdp_inspect.trace.run import ProcessGroup


def group(index: int, ranks: list[int], *, role: str = "other", **named) -> ProcessGroup:
    return ProcessGroup(index=index, name=str(index), ranks=ranks, role=role, **named)


def labels(*groups: ProcessGroup, world_size: int = 4) -> list[str]:
    return [one.label for one in find_dimensions(groups, world_size).values()]


@pytest.mark.parametrize(
    ("name", "dimension"),
    [
        ("tp", "tp"),
        ("mesh_tp", "tp"),
        ("tensor", "tp"),
        ("TENSOR_MODEL_PARALLEL_GROUP", "tp"),
        ("PIPELINE_MODEL_PARALLEL_GROUP", "pp"),
        ("CONTEXT_PARALLEL_GROUP", "cp"),
        ("EXPERT_MODEL_PARALLEL_GROUP", "ep"),
        ("dp_shard", "shard"),
        ("dp_replicate", "replicate"),
        ("ddp", "replicate"),
        ("dp", None),
        ("data", None),
        ("dp_shard_cp", None),
        ("default_pg", None),
        ("", None),
    ],
)
def test_a_usual_name_means_one_dimension(name, dimension):
    assert usual_dimension(name) == dimension


def test_the_sharder_decides_before_the_name_of_the_mesh():
    found = find_dimensions([group(0, [0, 1], role="shard", dimension="dp")], 4)
    assert found[0].label == "shard"
    assert found[0].name == "dp"
    assert not found[0].is_inferred


def test_all_ranks_are_the_world_unless_a_dimension_has_all_of_them():
    everyone = list(range(4))
    assert labels(group(0, everyone)) == ["world"]
    assert labels(group(0, everyone, role="shard")) == ["shard"]
    assert labels(group(0, everyone, dimension="tp")) == ["tp"]
    assert labels(group(0, everyone, dimension="loss")) == ["world"]


def test_a_name_of_the_user_stays():
    assert labels(group(0, [0, 1], dimension="mine")) == ["mine"]


def test_another_group_of_the_sharders_dimension_has_its_label():
    groups = [group(0, [0, 2], role="shard", dimension="dp"), group(1, [0, 2], dimension="dp")]
    assert labels(*groups) == ["shard", "shard"]


def test_equal_ranks_give_an_inferred_dimension():
    found = find_dimensions([group(0, [0, 1], role="shard"), group(1, [0, 1])], 4)
    assert found[1].label == "shard"
    assert found[1].is_inferred


def test_equal_ranks_of_two_dimensions_leave_it_unknown():
    groups = [group(0, [0, 1], dimension="ep"), group(1, [0, 1], dimension="tp")]
    assert labels(*groups, group(2, [0, 1])) == ["ep", "tp", "other"]


def test_other_ranks_leave_it_unknown():
    assert labels(group(0, [0, 1], role="shard"), group(1, [0, 2])) == ["shard", "other"]


def test_the_name_of_an_imported_group_is_an_inference():
    imported = group(0, [0, 1], dimension="TENSOR_MODEL_PARALLEL_GROUP", is_name_inferred=True)
    assert find_dimensions([imported], 4)[0].is_inferred


def test_the_stored_labels_state_their_reason():
    groups = with_labels(
        [group(0, [0, 1], role="shard"), group(1, [0, 2]), group(2, [0, 1, 2, 3])], 4
    )
    assert [one.parallelism for one in groups] == ["shard", "", "world"]
    assert [one.parallelism_from for one in groups] == ["sharder", "", "all_ranks"]
    assert find_dimensions(groups, 4) == find_dimensions(with_labels(groups, 4), 4)


def test_coordinates_follow_the_regular_groups_of_rank_0():
    groups = [
        group(0, [0, 2], role="shard"),
        group(1, [0, 1], dimension="tp"),
        group(2, [0, 4], dimension="pp"),
    ]
    assert find_coordinates(groups, 0, 8) == {"shard": 0, "tp": 0, "pp": 0}
    assert find_coordinates(groups, 5, 8) == {"shard": 0, "tp": 1, "pp": 1}
    assert find_coordinates(groups, 6, 8) == {"shard": 1, "tp": 0, "pp": 1}


def test_irregular_ranks_have_coordinates_only_inside_the_group():
    groups = [group(0, [0, 1, 5], dimension="tp")]
    assert find_coordinates(groups, 5, 6) == {"tp": 2}
    assert find_coordinates(groups, 3, 6) == {}


def test_labels_have_one_order():
    given = ["world", "other", "tp", "mine", "shard", "tp"]
    assert order_labels(given) == ["shard", "tp", "mine", "world", "other"]


def test_an_unknown_dimension_is_called_other():
    assert MeshDimension("other") == find_dimensions([group(0, [1])], 4)[0]
