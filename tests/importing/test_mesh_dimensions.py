"""Imported traces: the dimension of a process group from its description, its use and its ranks."""

import pytest

from fsdp_inspect.importing.kineto import import_traces
from fsdp_inspect.run import open_run
from fsdp_inspect.trace.codes import EventKind
from tests.importing.kineto_traces import NCCL, TraceWriter, fsdp2_step

SHARD, OTHERS = [0, 1, 2, 3], [0, 4]


def imported(tmp_path, *groups, listed=True):
    """One step of FSDP2 on four of eight ranks, and an all-reduce in each of the given groups."""
    trace = TraceWriter(world_size=8)
    trace.world_size = 4
    fsdp2_step(trace)
    described = [{"pg_name": "0", "pg_desc": "mesh_dp", "pg_size": 4, "ranks": SHARD}]
    for place, (description, ranks) in enumerate(groups):
        name = str(place + 1)
        described.append(
            {"pg_name": name, "pg_desc": description, "pg_size": len(ranks), "ranks": ranks}
        )
        trace.world_size = len(ranks)
        metadata = {
            "Process Group Name": name,
            "Process Group Description": description,
            "Process Group Ranks": str(ranks) if listed else "[0, 1, ..., 7]",
        }
        trace.collective("allreduce", 920 + place, 921 + place, issued=1, **metadata)
    trace.beside["distributedInfo"]["pg_config"] = described if listed else []
    trace.beside["distributedInfo"]["pg_count"] = len(described)
    import_traces(trace.write(tmp_path / "trace.json"), tmp_path / "run")
    return {group.name: group for group in open_run(tmp_path / "run").manifest.process_groups}


@pytest.mark.parametrize(
    ("description", "ranks", "found"),
    [
        ("mesh_tp", OTHERS, ("tp", "mesh")),
        ("mesh_mine", OTHERS, ("mine", "mesh")),
        ("TENSOR_MODEL_PARALLEL_GROUP", OTHERS, ("tp", "name")),
        ("mesh_dim_1", OTHERS, ("", "")),
        ("undefined", OTHERS, ("", "")),
        ("default_pg", list(range(8)), ("world", "all_ranks")),
    ],
)
def test_a_group_has_the_dimension_of_its_description(tmp_path, description, ranks, found):
    groups = imported(tmp_path, (description, ranks))
    group = groups["1" if description in ("undefined", "default_pg") else description]
    assert group.ranks == ranks
    assert (group.parallelism, group.parallelism_from) == found
    assert groups["mesh_dp"].parallelism == "shard"


def test_the_message_of_an_all_to_all_is_what_the_rank_sends(tmp_path):
    trace = TraceWriter()
    sizes = {"In msg nelems": 100, "Out msg nelems": 300}
    trace.collective("all_to_allv", 10, 20, issued=1, kernel=NCCL.format("SendRecv"), **sizes)
    import_traces(trace.write(tmp_path / "trace.json"), tmp_path / "run")
    (event,) = open_run(tmp_path / "run").source.events(0, kinds=[EventKind.ALL_TO_ALL]).bytes
    assert event == 2 * 100


def test_equal_ranks_are_an_inference(tmp_path):
    groups = imported(tmp_path, ("mesh_tp", OTHERS), ("undefined", OTHERS))
    assert (groups["2"].parallelism, groups["2"].parallelism_from) == ("tp", "ranks")


def test_ranks_that_no_trace_lists_tell_nothing(tmp_path):
    groups = imported(tmp_path, ("mesh_tp", OTHERS), ("undefined", OTHERS), listed=False)
    assert not groups["2"].are_ranks_known
    assert groups["2"].parallelism == ""
