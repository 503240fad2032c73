"""The number of communicating ranks: stated by the trace, inferred, or unknown."""

from fsdp_inspect.analysis.bandwidth import measure_bandwidth
from fsdp_inspect.importing.kineto import import_traces
from fsdp_inspect.store.reader import open_run
from tests.importing.kineto_traces import TraceWriter, fsdp2_step

GROUP_WORDS = (
    "Group size",
    "Process Group Name",
    "Process Group Description",
    "Process Group Ranks",
)


def imported(tmp_path, *, listed, named, world_size=8):
    """One step of FSDP2, with or without `distributedInfo` and the groups of its messages."""
    trace = TraceWriter(world_size=world_size)
    fsdp2_step(trace)
    if not listed:
        del trace.beside["distributedInfo"]
    for event in trace.events if not named else ():
        for word in GROUP_WORDS:
            event.get("args", {}).pop(word, None)
    result = import_traces(trace.write(tmp_path / "trace.json"), tmp_path / "run")
    return result, open_run(tmp_path / "run")


def test_what_the_trace_lists_is_known_and_nothing_is_said(tmp_path):
    result, run = imported(tmp_path, listed=True, named=True)
    assert result.world_size == 8
    assert not any("process group" in note or "world size" in note for note in result.notes)
    assert {unit.sharded_bytes for unit in run.manifest.units} == {1024 // 8, 2048 // 8}


def test_messages_that_name_no_group_are_of_the_only_one_that_is_listed(tmp_path):
    _, run = imported(tmp_path, listed=True, named=False)
    assert {row.group_size for row in measure_bandwidth(run).kinds} == {8}


def test_without_distributed_info_the_number_of_ranks_is_inferred_and_said(tmp_path):
    result, run = imported(tmp_path, listed=False, named=True)
    assert result.world_size == run.manifest.world_size == 8
    assert any("at least 8" in note and "(inferred)" in note for note in result.notes)
    assert {row.group_size for row in measure_bandwidth(run).kinds} == {8}


def test_where_nothing_tells_the_group_no_bandwidth_and_no_share_is_made_up(tmp_path):
    result, run = imported(tmp_path, listed=False, named=False)
    assert any(note.startswith("5 collectives name no process group") for note in result.notes)
    kinds = measure_bandwidth(run).kinds
    assert {(row.group_size, row.bus_bytes_per_s) for row in kinds} == {(None, None)}
    assert {unit.sharded_bytes for unit in run.manifest.units} == {0}


def test_a_group_that_one_message_names_is_not_that_of_those_that_name_none(tmp_path):
    trace = TraceWriter(world_size=8)
    del trace.beside["distributedInfo"]
    trace.collective("allreduce", 20, 30, issued=1)
    trace.collective("allreduce", 40, 50, issued=2)
    for event in trace.events[-2:]:
        for word in GROUP_WORDS:
            event["args"].pop(word, None)
    import_traces(trace.write(tmp_path / "trace.json"), tmp_path / "run")
    kinds = measure_bandwidth(open_run(tmp_path / "run")).kinds
    assert sorted((row.group_size or 0) for row in kinds) == [0, 8]


def test_ranks_of_a_group_that_are_not_listed_are_said_to_be_counted(tmp_path):
    trace = TraceWriter(world_size=8)
    trace.beside["distributedInfo"] = {"backend": "nccl", "rank": 0, "world_size": 64}
    trace.collective("allreduce", 20, 30, issued=1, **{"Process Group Ranks": "[0, 1, ..., 7]"})
    result = import_traces(trace.write(tmp_path / "trace.json"), tmp_path / "run")
    assert any("numbered from 0 (inferred)" in note for note in result.notes)
