"""An import of any file ends with a run or with a message, and leaves nothing else."""

import gzip
import json
import os

import pytest
from hypothesis import given, settings, strategies as st

from fsdp_inspect.analysis.breakdown import measure_breakdown
from fsdp_inspect.errors import FsdpInspectError, ImportingError
from fsdp_inspect.importing.kineto import import_traces
from fsdp_inspect.importing.trace_file import ImportLimits
from fsdp_inspect.store.reader import open_run
from tests.cases import examples
from tests.importing.kineto_traces import TraceWriter, fsdp2_step


@pytest.fixture(scope="module")
def whole():
    trace = TraceWriter()
    fsdp2_step(trace)
    return trace.text().encode()


def import_bytes(folder, content, **options):
    path = folder / "trace.json"
    path.write_bytes(content)
    return import_traces(path, folder / "run", **options)


def assert_nothing_is_left(folder):
    assert sorted(path.name for path in folder.iterdir()) == ["trace.json"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        pytest.param(b"", "is empty", id="empty"),
        pytest.param(b"{}", "without 'traceEvents'", id="no events"),
        pytest.param(b'{"traceEvents": []}', "no kernels and no communication", id="nothing"),
        pytest.param(b"\x80\x04]q\x00.", "begins with", id="pickle"),
        pytest.param(gzip.compress(b"[]")[:-4], "cannot be unpacked: ", id="cut gzip"),
        pytest.param(b"\x1f\x8b" + b"\x00" * 40, "cannot be unpacked", id="no gzip"),
        pytest.param(gzip.compress(b""), "is empty", id="empty gzip"),
        pytest.param(
            b'{"traceEvents": [{"ph": "X", "ts": 1' + b"0" * 5000 + b"}]}",
            "a number with thousands of digits. Expected a trace",
            id="absurd number",
        ),
    ],
)
def test_what_cannot_be_imported_is_said(tmp_path, content, says):
    with pytest.raises(ImportingError, match=r"trace\.json") as raised:
        import_bytes(tmp_path, content)
    assert says in str(raised.value)
    assert_nothing_is_left(tmp_path)


def test_half_of_a_surrogate_pair_in_names_becomes_a_run_that_opens(tmp_path, whole):
    names = {b"layers.0": rb"layers.0\ud800", b"H100": rb"H100\udfff"}
    for name, changed in names.items():
        assert name in whole
        whole = whole.replace(name, changed)
    import_bytes(tmp_path, whole)
    run = open_run(tmp_path / "run")
    assert [unit.fqn for unit in run.manifest.units] == ["", "layers.0?"]


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_a_trace_that_is_cut_off_leaves_nothing(tmp_path, whole, share):
    with pytest.raises(ImportingError, match="cut off"):
        import_bytes(tmp_path, whole[: int(share * len(whole))])
    assert_nothing_is_left(tmp_path)


@pytest.mark.parametrize("behind", [b"junk", b"\0" * 300])
def test_bytes_behind_a_complete_gzip_file_are_no_damage(tmp_path, whole, behind):
    import_bytes(tmp_path, gzip.compress(whole) + behind)
    assert measure_breakdown(open_run(tmp_path / "run")).headline.step_time_ns > 0


@pytest.mark.parametrize("broken", [b"", b"{", None, b"[1, 2]", b'{"a": 1}'])
def test_a_rank_that_is_damaged_is_left_out_and_named(tmp_path, whole, broken):
    folder = tmp_path / "traces"
    folder.mkdir()
    (folder / "rank0.json").write_bytes(whole[:-50] if broken is None else broken)
    (folder / "rank1.json").write_bytes(whole)
    imported = import_traces(folder, tmp_path / "run")
    assert imported.files == ("rank1.json",)
    assert any(note.startswith("rank0.json was left out: ") for note in imported.notes)


def test_if_no_rank_can_be_read_nothing_is_left(tmp_path, whole):
    folder = tmp_path / "traces"
    folder.mkdir()
    for rank in (0, 1):
        (folder / f"rank{rank}.json").write_bytes(whole[:-50])
    with pytest.raises(ImportingError, match=r"rank0\.json"):
        import_traces(folder, tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["traces"]


def test_an_interrupted_import_leaves_nothing(tmp_path, whole):
    def interrupt(name, share):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_bytes(tmp_path, whole, on_progress=interrupt)
    assert_nothing_is_left(tmp_path)


def test_a_file_made_to_fill_memory_is_refused(tmp_path):
    bomb = gzip.compress(b'{"traceEvents": [' + b" " * (80 << 20))
    with pytest.raises(ImportingError, match=r"over 200 times .* --max-size"):
        import_bytes(tmp_path, bomb)
    assert_nothing_is_left(tmp_path)


def test_a_file_over_the_limit_is_refused_and_a_higher_limit_reads_it(tmp_path, whole):
    with pytest.raises(ImportingError, match=r"more than 1\.00 KiB\. .* --max-size"):
        import_bytes(tmp_path, whole, limits=ImportLimits(max_bytes=1024))
    assert import_bytes(tmp_path, whole, limits=ImportLimits(max_bytes=1 << 20)).num_collectives


def test_an_absurd_rank_is_refused(tmp_path, whole):
    content = whole.replace(b'"rank": 0', b'"rank": 99999999999')
    with pytest.raises(ImportingError, match="Expected a rank below"):
        import_bytes(tmp_path, content)


@pytest.mark.parametrize("time", [float("nan"), -5.0, 1e300])
def test_a_trace_without_one_sound_time_says_that_its_times_are_at_fault(tmp_path, whole, time):
    content = json.loads(whole)
    content["traceEvents"] = [{**event, "ts": time} for event in content["traceEvents"]]
    with pytest.raises(ImportingError, match="NaN, negative or out-of-range") as raised:
        import_bytes(tmp_path, json.dumps(content).encode())
    assert "ProfilerActivity" not in str(raised.value)


@pytest.mark.parametrize("field", ["ts", "dur", "baseTimeNanoseconds"])
@pytest.mark.parametrize("time_ns", [(1 << 61) - 1, (1 << 62) - 1, 1 << 70])
def test_one_absurd_time_is_left_out(tmp_path, whole, field, time_ns):
    content = json.loads(whole)
    if field == "baseTimeNanoseconds":
        content[field] = time_ns
    else:
        event = next(each for each in content["traceEvents"] if each.get("cat") == "kernel")
        event[field] = time_ns / 1000
    imported = import_bytes(tmp_path, json.dumps(content).encode())
    (tmp_path / "other").mkdir()
    undamaged = import_bytes(tmp_path / "other", whole)
    num_lost = 0 if field == "baseTimeNanoseconds" else 1
    assert imported.num_collectives == undamaged.num_collectives - num_lost


def test_a_folder_without_traces_is_said(tmp_path):
    with pytest.raises(ImportingError, match="No trace found at"):
        import_traces(tmp_path, tmp_path / "run")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_trace_that_may_not_be_read_is_said(tmp_path, whole):
    (tmp_path / "trace.json").write_bytes(whole)
    (tmp_path / "trace.json").chmod(0)
    with pytest.raises(ImportingError, match="cannot be read"):
        import_traces(tmp_path / "trace.json", tmp_path / "run")


def test_equal_ids_and_ranges_that_contradict_each_other_are_borne(tmp_path, whole):
    content = json.loads(whole)
    for event in content["traceEvents"]:
        if "correlation" in event.get("args", {}):
            event["args"]["correlation"] = 1
    content["traceEvents"] += content["traceEvents"]
    import_bytes(tmp_path, json.dumps(content).encode())
    assert_the_parts_add_up(tmp_path / "run")


def assert_the_parts_add_up(folder):
    for split in measure_breakdown(open_run(folder)).ranks:
        assert sum(part.duration_ns for part in split.parts) == split.step_time_ns


ODD = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=5)
    | st.lists(st.integers(-2, 2**40), max_size=3)
    | st.sampled_from(["FSDP::all_gather", "FSDP::pre_forward (a)", "c10d::allreduce_", "kernel"])
)
FIELDS = ("ph", "cat", "name", "ts", "dur", "pid", "tid", "args")
ARGUMENTS = ("correlation", "External id", "dtype", "Group size", "Out msg nelems", "stream")


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_events_with_odd_values_are_borne_or_refused_in_words(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("odd")
    trace = TraceWriter()
    fsdp2_step(trace)
    for event in data.draw(st.lists(st.sampled_from(trace.events), max_size=6)):
        event[data.draw(st.sampled_from(FIELDS))] = data.draw(ODD)
        if isinstance(event.get("args"), dict):
            event["args"][data.draw(st.sampled_from(ARGUMENTS))] = data.draw(ODD)
    try:
        import_bytes(folder, trace.text().encode(), by_step=data.draw(st.booleans()))
    except FsdpInspectError:
        assert_nothing_is_left(folder)
    else:
        assert_the_parts_add_up(folder / "run")


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_damaged_bytes_are_borne_or_refused_in_words(tmp_path_factory, whole, data):
    folder = tmp_path_factory.mktemp("damaged")
    content = bytearray(whole)
    for place in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=5)):
        content[place] = data.draw(st.integers(0, 255))
    try:
        import_bytes(folder, bytes(content))
    except FsdpInspectError:
        assert_nothing_is_left(folder)
    else:
        assert_the_parts_add_up(folder / "run")


def import_groups(folder, group=None, **distributed):
    """Import a trace with other values in `distributedInfo` and its group; return the manifest."""
    trace = TraceWriter()
    fsdp2_step(trace)
    trace.beside["distributedInfo"] |= distributed
    trace.beside["distributedInfo"]["pg_config"][0] |= group or {}
    import_bytes(folder, trace.text().encode())
    return open_run(folder / "run").manifest


@pytest.mark.parametrize("ranks", [[0, -1], "[0, -1]", [0, 10**15]])
def test_a_damaged_list_of_ranks_counts_as_abbreviated(tmp_path, ranks):
    manifest = import_groups(tmp_path, {"ranks": ranks})
    assert [group.ranks for group in manifest.process_groups] == [[0, 1]]


@pytest.mark.parametrize("size", [-3, 10**17, True, "many"])
def test_a_damaged_group_size_counts_as_unknown(tmp_path, size):
    manifest = import_groups(tmp_path, {"ranks": [], "pg_size": size})
    assert manifest.world_size == 2
    assert [group.ranks for group in manifest.process_groups] == [[]]


@pytest.mark.parametrize("size", [-3, 10**17, True, "many"])
def test_a_damaged_world_size_is_that_of_the_groups(tmp_path, size):
    assert import_groups(tmp_path, world_size=size).world_size == 2
