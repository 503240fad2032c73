"""Dumps of torch's flight recorder become runs that `diagnose` explains."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from fsdp_inspect.analysis.run_heading import describe_sharding
from fsdp_inspect.analysis.summary import measure_summary
from fsdp_inspect.diagnosis.collective_grid import CellState
from fsdp_inspect.diagnosis.diagnose import Diagnosis, ProblemClass, Status, Unknown
from fsdp_inspect.errors import CorruptFileError, FsdpInspectError, ImportingError, NotARunError
from fsdp_inspect.importing.flight_recorder import import_dumps, looks_like_dumps
from fsdp_inspect.importing.flight_recorder_file import read_dump
from fsdp_inspect.report.diagnosis import describe_diagnosis
from fsdp_inspect.report.wording import describe_run
from fsdp_inspect.run import open_run
from fsdp_inspect.store.reader import open_run as read_run
from fsdp_inspect.trace.black_box import CAPACITY
from fsdp_inspect.trace.codes import EventKind
from tests.conftest import Torchrun
from tests.importing.flight_recorder_dumps import (
    BEGIN_NS,
    FSDP_FRAMES,
    SECOND,
    USER_FRAMES,
    WAITING,
    entry,
)


def write(
    folder: Path,
    entries: dict[int, list[dict[str, Any]]],
    *,
    ranks: str = "[0, 1, 2]",
    **groups: str,
):
    """The dumps of some ranks, with the ranks of further groups by name."""
    folder.mkdir(exist_ok=True)
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}}
    config |= {name: {"name": name, "desc": name, "ranks": each} for name, each in groups.items()}
    for rank, each in entries.items():
        file = folder / f"nccl_trace_rank_{rank}"
        file.write_text(json.dumps({"version": "2.10", "pg_config": config, "entries": each}))
    return folder


def diagnose_dumps(folder: Path) -> Diagnosis:
    import_dumps(folder, folder.parent / "run")
    return open_run(folder.parent / "run").diagnose()


def test_the_command_diagnoses_dumps_without_an_import(tmp_path: Path, invoke) -> None:
    done = [entry(0), entry(1)]
    folder = write(tmp_path / "dumps", {0: [*done, entry(2, **WAITING)], 1: done, 2: done})
    before = sorted(tmp_path.rglob("*"))
    ended = invoke("diagnose", folder)
    assert ended.code == 1
    assert "never reached all-gather 3 (600 B)" in " ".join(ended.out.split())
    assert invoke("diagnose", folder, "--json").code == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_ranks_that_all_wait_may_make_progress(tmp_path: Path) -> None:
    waiting = [entry(0), entry(1, **WAITING)]
    found = diagnose_dumps(write(tmp_path / "dumps", dict.fromkeys(range(3), waiting)))
    assert (found.problem, found.is_certain) == (ProblemClass.TRANSPORT_STUCK, False)
    assert any("dump again after a minute" in each for each in describe_diagnosis(found).next)


def test_the_rank_whose_device_has_not_started_a_collective_is_late(tmp_path: Path) -> None:
    queued = WAITING | {"state": "scheduled", "time_discovered_started_ns": None}
    waits = [entry(0), entry(1, **WAITING), entry(2, **queued)]
    behind = [entry(0), entry(1, **queued), entry(2, **queued)]

    found = diagnose_dumps(write(tmp_path / "dumps", {0: waits, 1: waits, 2: behind}))

    assert (found.problem, found.ranks, found.is_certain) == (ProblemClass.RANK_LATE, (2,), False)
    described = describe_diagnosis(found)
    assert described.sentence.startswith(
        "Probably: Rank 2 had not started all-gather 2 (600 B) in forward. Its device was in "
        "earlier work, which a dump does not show: it had issued collectives that the device had "
        "not started. 2 ranks waited for it."
    )
    assert "The device of rank 2 had not started it." in described.evidence[0]
    assert "Rank 2: issued collectives that its device had not started." in described.evidence
    assert found.grid is not None
    states = {column.ranks: column.cells[-1].state for column in found.grid.columns}
    assert states == {(0, 1): CellState.WAITS, (2,): CellState.NOT_STARTED}
    notes = " ".join(read_run(tmp_path / "run").manifest.notes)
    assert "that rank 2 issued, and that the device had not started" in notes


def test_a_circle_beside_a_complete_group_is_named(tmp_path: Path) -> None:
    """Ranks 0 and 1 issue two collectives in opposite orders; all of `other` have issued theirs."""
    queued = WAITING | {"state": "scheduled", "time_discovered_started_ns": None}

    def issue(group: str, position: int, **fields: Any) -> dict[str, Any]:
        of_group = {
            "process_group": [group, group],
            "collective_seq_id": 2,
            "output_sizes": [[200]],
        }
        return entry(position, **(of_group if group != "0" else {}) | fields)

    entries = {
        rank: [entry(0), issue(group, 0, collective_seq_id=1), entry(1, **WAITING)]
        for rank, group in enumerate(["pair", "pair", "other", "other"])
    }
    for rank, group in enumerate(["pair", "", "other", "other"]):
        entries[rank] += [issue(group, 2, **queued)] if group else []
    entries[1][2:] = [issue("pair", 1, **WAITING), entry(1, **queued)]

    folder = write(tmp_path / "dumps", entries, ranks="[0, 1, 2, 3]", pair="[0, 1]", other="[2, 3]")
    found = diagnose_dumps(folder)

    assert (found.status, found.is_certain) == (Status.PROBLEM, False)
    assert "The ranks wait for each other" in describe_diagnosis(found).sentence


def test_dumps_longer_than_a_black_box_are_compared_where_all_have_them(tmp_path: Path) -> None:
    done = [entry(number) for number in range(CAPACITY + 9)]
    waits = [*done, entry(len(done), **WAITING)]

    found = diagnose_dumps(write(tmp_path / "dumps", {0: waits, 1: waits, 2: done}))

    assert f"Rank 2 never reached all-gather {len(waits)}" in describe_diagnosis(found).sentence


@pytest.mark.parametrize("state", ["started", "scheduled"])
def test_a_collective_that_one_rank_has_finished_shows_no_standstill(tmp_path: Path, state) -> None:
    """A rank finishes it after all have joined it, so the other dumps are older."""
    waits = [entry(0), entry(1, **WAITING | {"state": state})]
    done = [entry(0), entry(1)]

    found = diagnose_dumps(write(tmp_path / "dumps", {0: done, 1: waits, 2: waits}))

    assert (found.status, found.unknown) == (Status.CANNOT_TELL, Unknown.TIME_OF_DUMP)


def test_the_last_collective_of_several_late_ranks_is_that_of_the_first(tmp_path: Path) -> None:
    done = [entry(0), entry(1)]
    waits = [*done, entry(2, **WAITING)]

    found = diagnose_dumps(write(tmp_path / "dumps", {0: waits, 1: done, 2: done}))

    sentence = describe_diagnosis(found).sentence
    assert "Ranks 1-2 never reached all-gather 3" in sentence
    assert "Rank 1's last collective was all-gather 2" in sentence


@pytest.mark.parametrize("state", ["started", "scheduled"])
def test_a_dump_that_is_older_than_the_others_names_no_rank(tmp_path: Path, state) -> None:
    """Others have finished a collective that is open in it, so its rank had joined that."""
    waits = [entry(0), entry(1), entry(2, **WAITING)]
    queued = WAITING | {"time_discovered_started_ns": None}
    older = [entry(0), entry(1, **queued | {"state": state})]
    older.append(entry(2, **queued | {"state": "scheduled"}))

    found = diagnose_dumps(write(tmp_path / "dumps", {0: waits, 1: older, 2: waits}))

    assert (found.status, found.unknown) == (Status.CANNOT_TELL, Unknown.TIME_OF_DUMP)


def test_a_rank_whose_dump_has_no_starts_is_not_late(tmp_path: Path) -> None:
    """TORCH_NCCL_ENABLE_TIMING is set on some ranks only."""
    waits = [entry(0), entry(1, **WAITING)]
    unseen = {"time_discovered_started_ns": None}
    queued = [entry(0, **unseen), entry(1, **WAITING | unseen | {"state": "scheduled"})]

    found = diagnose_dumps(write(tmp_path / "dumps", {0: waits, 1: waits, 2: queued}))

    assert (found.problem, found.ranks) == (ProblemClass.TRANSPORT_STUCK, ())


def test_the_rank_that_did_not_issue_a_collective_is_late(tmp_path: Path) -> None:
    done = [entry(0), entry(1)]
    waiting = [*done, entry(2, **WAITING)]

    found = diagnose_dumps(write(tmp_path / "dumps", {0: waiting, 1: done, 2: waiting}))

    assert (found.problem, found.ranks, found.step) == (ProblemClass.RANK_LATE, (1,), None)
    assert (found.is_certain, found.unknown) == (False, Unknown.TIME_OF_DUMP)
    assert not any("nothing moved" in each for each in describe_diagnosis(found).evidence)
    assert describe_diagnosis(found).sentence == (
        "Probably: Rank 1 never reached all-gather 3 (600 B) in forward. Its last collective was "
        "all-gather 2 (600 B) in forward (ann/train.py:40). A dump does not show its activity "
        "after that. 2 ranks waited for it."
    )


def test_a_collective_that_all_have_issued_is_the_transport(tmp_path: Path) -> None:
    waiting = [entry(0), entry(1, **WAITING)]
    found = diagnose_dumps(write(tmp_path / "dumps", dict.fromkeys(range(3), waiting)))
    assert (found.problem, found.ranks) == (ProblemClass.TRANSPORT_STUCK, ())


def test_a_collective_of_the_script_is_told_from_those_of_fsdp(tmp_path: Path) -> None:
    loss = entry(1, profiling_name="nccl:all_reduce", frames=USER_FRAMES, output_sizes=[[100]])
    entries = {0: [entry(0), loss], 1: [entry(0), entry(1)], 2: [entry(0), entry(1)]}

    found = diagnose_dumps(write(tmp_path / "dumps", entries))

    assert (found.problem, found.ranks) == (ProblemClass.ORDER_DIVERGED, (0,))
    assert found.location == "/home/ann/train.py:55"
    assert "an all-reduce of no unit (200 B)" in describe_diagnosis(found).sentence


def test_ranks_whose_dumps_have_no_stacks_are_not_called_different(tmp_path: Path) -> None:
    loss = entry(1, profiling_name="nccl:all_reduce", frames=USER_FRAMES, output_sizes=[[100]])
    entries = {0: [entry(0), loss], 1: [entry(0), {**loss, "frames": []}], 2: [entry(0), loss]}

    found = diagnose_dumps(write(tmp_path / "dumps", entries))

    assert found.difference is None
    assert found.problem is None


def test_a_rank_without_a_dump_is_missing(tmp_path: Path) -> None:
    waiting = [entry(0), entry(1, **WAITING)]
    found = diagnose_dumps(write(tmp_path / "dumps", {0: waiting, 2: waiting}))
    assert (found.status, found.missing_ranks) == (Status.CANNOT_TELL, (1,))


def test_equal_dumps_of_ranks_that_moved_show_no_hang(tmp_path: Path) -> None:
    found = diagnose_dumps(
        write(tmp_path / "dumps", {key: [entry(0), entry(1)] for key in range(3)})
    )
    assert (found.status, found.unknown) == (Status.CANNOT_TELL, Unknown.TIME_OF_DUMP)


@pytest.mark.parametrize("age_s", [0, 2, 90])
def test_the_time_of_the_file_changes_nothing(tmp_path: Path, age_s: int) -> None:
    done = [entry(0), entry(1)]
    waiting = [*done, entry(2, **WAITING)]
    folder = write(tmp_path / "dumps", {0: waiting, 1: done, 2: waiting})
    for file in folder.iterdir():
        os.utime(file, ns=(BEGIN_NS + age_s * SECOND,) * 2)

    found = diagnose_dumps(folder)

    assert (found.problem, found.ranks, found.is_certain) == (ProblemClass.RANK_LATE, (1,), False)
    assert any("dump again after a minute" in each for each in describe_diagnosis(found).next)


def test_dumps_that_begin_at_other_positions_are_compared_where_all_have_them(
    tmp_path: Path,
) -> None:
    entries = [entry(number) for number in range(6)]
    found = diagnose_dumps(write(tmp_path / "dumps", {0: entries, 1: entries[2:], 2: entries[3:]}))
    assert found.difference is None


def test_a_damaged_dump_is_a_missing_rank_with_the_reason(tmp_path: Path, invoke) -> None:
    folder = write(tmp_path / "dumps", {key: [entry(0)] for key in range(3)})
    (folder / "nccl_trace_rank_1").write_text('{"version": "2.10", "pg_config": {}, "entr')

    imported = import_dumps(folder, tmp_path / "run")

    assert imported.ranks == (0, 2)
    assert any(
        "Rank 1 is missing" in note and "no complete JSON" in note for note in imported.notes
    )
    assert "note: Rank 1 is missing, because its dump" in invoke("diagnose", folder).out


def test_absurd_ranks_and_sizes_of_groups_are_ignored(tmp_path: Path) -> None:
    gathers = [entry(number, input_sizes=[[1]], output_sizes=[[1 << 49]]) for number in range(2)]
    folder = write(tmp_path / "dumps", {0: gathers, 1: gathers}, ranks="[0, 10000000000000000000]")

    assert import_dumps(folder, tmp_path / "run").world_size == 2


@pytest.mark.parametrize(
    ("names", "error", "words"),
    [
        (["a_rank_1", "b_rank_1"], ImportingError, "both of rank 1"),
        (["trace"], ImportingError, "no rank in its name"),
        ([], NotARunError, "No flight recorder dump found"),
    ],
)
def test_names_that_do_not_fit_are_refused(
    tmp_path: Path, names: list[str], error: type[FsdpInspectError], words: str
) -> None:
    folder = tmp_path / "dumps"
    folder.mkdir()
    for name in names:
        (folder / name).write_text(json.dumps({"version": "2.10", "pg_config": {}, "entries": []}))
    with pytest.raises(error, match=words):
        import_dumps(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("field", ["record_id", "collective_seq_id", "process_group"])
def test_a_dump_whose_entries_cannot_be_read_is_not_called_empty(tmp_path: Path, field) -> None:
    whole = [entry(0), entry(1)]
    damaged = [{key: each[key] for key in each if key != field} for each in whole]
    folder = write(tmp_path / "dumps", {0: whole, 1: damaged, 2: whole})
    [note] = [each for each in import_dumps(folder, tmp_path / "run").notes if "Rank 1" in each]
    assert "lists 2 collectives, but none with a valid `record_id`" in note
    with pytest.raises(CorruptFileError, match="lists 2 collectives"):
        import_dumps(folder / "nccl_trace_rank_1", tmp_path / "other")


def _gloo(number: int, function: str, **fields: Any) -> dict[str, Any]:
    frame = {"name": function, "filename": "/x/site-packages/torch/distributed/c10d.py", "line": 1}
    frames = [frame, *FSDP_FRAMES[1:]] if function else []
    return entry(number, profiling_name="gloo:all_reduce", frames=frames, **fields)


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        ("reduce_scatter_single", EventKind.REDUCE_SCATTER),
        ("_reduce_scatter_base", EventKind.REDUCE_SCATTER),
        ("all_reduce", EventKind.ALL_REDUCE),
        ("", EventKind.ALL_REDUCE),
    ],
)
def test_a_reduce_scatter_of_gloo_is_known_by_its_stack(tmp_path, function, kind) -> None:
    folder = write(tmp_path / "dumps", {0: [_gloo(0, function)]})
    [each] = read_dump(folder / "nccl_trace_rank_0").collectives
    assert each.kind is kind


def test_ranks_without_stacks_issue_the_same_reduce_scatter(tmp_path: Path) -> None:
    dumps = {0: [_gloo(0, "reduce_scatter_single")], 1: [_gloo(0, "")], 2: [_gloo(0, "")]}
    assert diagnose_dumps(write(tmp_path / "dumps", dumps)).difference is None


def test_the_device_units_and_steps_of_a_dump_are_unknown(tmp_path: Path) -> None:
    folder = write(tmp_path / "dumps", {key: [entry(0)] for key in range(3)})
    import_dumps(folder, tmp_path / "run")
    run = read_run(tmp_path / "run")
    summary = measure_summary(run)
    assert describe_run(summary) == "3 ranks · nccl"
    assert describe_sharding(run.manifest) == ""
    assert not run.manifest.is_kernel_trace
    assert summary.verdict.sentence == "The limit is unknown: the import has no timed step."
    assert "more steps" not in "".join(summary.verdict.next_steps)


@pytest.mark.parametrize("version", ["1.5", "3.0", None])
def test_another_version_is_refused(tmp_path: Path, version: str | None) -> None:
    file = tmp_path / "dump_rank_0"
    file.write_text(json.dumps({"version": version, "pg_config": {}, "entries": []}))
    with pytest.raises(CorruptFileError, match="Expected version 2"):
        read_dump(file)


def test_dumps_of_different_times_are_noted(tmp_path: Path) -> None:
    later = [entry(0, time_created_ns=BEGIN_NS + 80 * SECOND)]
    imported = import_dumps(
        write(tmp_path / "dumps", {0: [entry(0)], 1: later, 2: later}), tmp_path / "run"
    )
    assert any("may be of another run" in note for note in imported.notes)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(sorted(entry(0))), _VALUES))
def test_damaged_values_are_left_out_or_read(tmp_path_factory, fields: dict[str, Any]) -> None:
    folder = write(
        tmp_path_factory.mktemp("fuzz") / "dumps", {0: [{**entry(0), **fields}], 1: [entry(0)]}
    )
    imported = import_dumps(folder, folder.parent / "run")
    assert 1 in imported.ranks
    open_run(folder.parent / "run").diagnose()


HANG = """
import os, sys, threading, time
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch._C._distributed_c10d import _dump_fr_trace, _dump_fr_trace_json

dist.init_process_group("gloo")
rank = dist.get_rank()
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
for layer in model:
    fully_shard(layer)

def dump():
    while not all(os.path.exists(f"at-{each}") for each in range(2)):
        time.sleep(0.05)
    time.sleep(6)
    if sys.argv[1] == "json":
        text = _dump_fr_trace_json(True, False)
        open(f"fr_rank_{rank}.json", "wb").write(text if isinstance(text, bytes) else text.encode())
    else:
        open(f"fr_rank_{rank}", "wb").write(_dump_fr_trace(True, True, False))
    os._exit(0)

threading.Thread(target=dump, daemon=True).start()
for step in range(4):
    if step == 3:
        open(f"at-{rank}", "w").close()
        if rank == 1:
            time.sleep(1000)
    model(torch.ones(2, 8)).sum().backward()
"""


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("form", ["pickle", "json"])
def test_real_dumps_of_gloo_name_the_late_rank(
    run_ranks: Torchrun, tmp_path: Path, form: str
) -> None:
    """torch 2.13: gloo's dumps have no ends, and no ranks of groups for a sub-group."""
    folder = tmp_path / "dumps"
    folder.mkdir()
    (folder / "hang.py").write_text(HANG)
    ring = {"TORCH_FR_BUFFER_SIZE": "2000"}

    run_ranks("hang.py", form, cwd=folder, environment=ring, check=False)

    assert looks_like_dumps(folder)
    found = diagnose_dumps(folder)
    assert (found.problem, found.ranks) == (ProblemClass.RANK_LATE, (1,))
    assert found.wait is not None
    assert found.wait.waiting == (0,)


def test_a_rank_with_an_unusable_entry_is_not_late(tmp_path: Path) -> None:
    """Rank 1 may have issued what its last entry does not name."""
    issued = [entry(number) for number in range(4)]
    unusable = [*issued, {**entry(4), "record_id": None}]
    waiting = [*issued, entry(4, **WAITING)]
    write(tmp_path / "a", {0: waiting, 1: unusable, 2: waiting})
    found = diagnose_dumps(tmp_path / "a")
    assert 1 not in found.ranks
    assert "Rank 1 is missing: none of its entries is left." in open_run(tmp_path / "run").notes


def test_the_entries_after_an_unusable_one_are_compared(tmp_path: Path) -> None:
    damaged = [entry(0), "x", *(entry(number) for number in range(2, 4))]
    write(tmp_path / "a", {0: [*damaged, entry(4, **WAITING)], 1: damaged}, ranks="[0, 1]")
    found = diagnose_dumps(tmp_path / "a")
    assert (found.problem, found.ranks) == (ProblemClass.RANK_LATE, (1,))


def test_an_unusable_entry_in_an_unsorted_dump_leaves_out_its_rank(tmp_path: Path) -> None:
    """The entries after it may be older ones."""
    newest = [entry(2), entry(3), entry(4, **WAITING)]
    write(tmp_path / "a", {0: [*newest, "x", entry(0), entry(1)], 1: newest}, ranks="[0, 1]")
    diagnose_dumps(tmp_path / "a")
    assert "Rank 0 is missing: none of its entries is left." in open_run(tmp_path / "run").notes
