"""An untrusted pickle is read without imports or calls, and within limits."""

import io
import os
import pickle
import pickletools
import struct
import tracemalloc

import pytest
from hypothesis import given, settings, strategies as st

from fsdp_inspect.errors import CorruptFileError, FsdpInspectError
from fsdp_inspect.importing.snapshot import import_snapshot
from fsdp_inspect.importing.snapshot_pickle import read_plain_pickle
from tests.cases import examples
from tests.importing.snapshots import FakeAllocator, train

numbers = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.booleans()
plain = st.recursive(
    st.none() | numbers | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.lists(inner).map(tuple),
    max_leaves=30,
)


@given(plain, st.integers(2, 5))
def test_plain_values_are_read_as_python_reads_them(value, protocol):
    assert read_plain_pickle(pickle.dumps(value, protocol=protocol), "it") == value


def test_what_is_shared_or_holds_itself_is_read():
    shared = {"frames": [1]}
    loop = [shared] * 2000
    loop.append(loop)
    value = read_plain_pickle(pickle.dumps(loop, protocol=2), "it")
    assert value[0] is value[1999]
    assert value[-1] is value


class Runs:
    def __reduce__(self):
        return os.system, ("exit 1",)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_pickle_that_would_run_code_is_refused_by_name(protocol):
    name = f"{os.system.__module__}.system"
    with pytest.raises(CorruptFileError, match=rf"class or function '{name}'") as refused:
        read_plain_pickle(pickle.dumps({"segments": Runs()}, protocol=protocol), "trap.pickle")
    assert "No code of it was run" in str(refused.value)


REFUSED = {
    "persistent id": b"\x80\x04\x8c\x01aQ.",
    "extension": b"\x80\x04\x82\x01.",
    "build": b"\x80\x04}}b.",
    "old text number": b"\x80\x02I1\n.",
    "set": b"\x80\x04\x8f.",
    "buffer": b"\x80\x05\x97.",
    "a key that is a list": b"\x80\x04}]K\x01s.",
    "a key that is a deep tuple": b"\x80\x04})" + b"\x85" * 100_000 + b"K\x01s.",
    "items of a number": b"\x80\x04K\x01K\x02a.",
    "nothing on the stack": b"\x80\x04.",
    "nothing remembered": b"\x80\x04h\x07.",
    "a mark that nobody set": b"\x80\x04e.",
    "a long integer": b"\x80\x04\x8b" + struct.pack("<i", 1 << 20) + bytes(1 << 20) + b".",
    "text that is longer than the file": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60) + b"a.",
    "text that is no text": b"\x80\x04\x8c\x02\xff\xfe.",
    "protocol 0": b"(lp0\n.",
    "protocol 1": b"]q\x00.",
    "protocol 6": b"\x80\x06N.",
    "no end": b"\x80\x04N",
    "only a beginning": b"\x80\x04",
    "nothing": b"",
}


@pytest.mark.parametrize("data", REFUSED.values(), ids=REFUSED.keys())
def test_what_no_snapshot_holds_is_refused_in_words(data):
    with pytest.raises(CorruptFileError, match=r"it\.pickle .* Expected .*"):
        read_plain_pickle(data, "it.pickle")


BOMBS = {
    "lists": b"\x80\x04" + b"]" * 1_000_000 + b".",
    "dictionaries": b"\x80\x04" + b"}" * 1_000_000 + b".",
    "marks": b"\x80\x04" + b"(" * 1_000_000 + b".",
    "memory of one value": b"\x80\x04N" + b"\x94" * 1_000_000 + b".",
    "numbers": b"\x80\x04" + b"M\xff\xff" * 400_000 + b".",
    "doubling tuples": b"\x80\x04)" + b"\x94h\x00\x86" * 200_000 + b".",
}


@pytest.mark.parametrize("data", BOMBS.values(), ids=BOMBS.keys())
def test_a_small_file_cannot_take_much_memory(data):
    budget = 12 << 20
    tracemalloc.start()
    try:
        with pytest.raises(CorruptFileError, match=r"would take more memory|is damaged"):
            read_plain_pickle(data, "bomb.pickle", max_memory_bytes=budget)
        assert tracemalloc.get_traced_memory()[1] < 2 * budget
    finally:
        tracemalloc.stop()


def test_a_number_in_memory_far_away_takes_no_room_for_those_before():
    far = b"\x80\x02Nr" + struct.pack("<I", 2**32 - 1) + b"."
    assert read_plain_pickle(far, "it") is None


def test_very_deep_nesting_ends_without_a_crash():
    deep = b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b"."
    assert len(read_plain_pickle(deep, "it")) == 1


SNAPSHOT = pickle.dumps(train(FakeAllocator(), num_steps=1).snapshot(), protocol=4)


def refusal_of(action):
    """The message of a refusal; None without one. Other exceptions propagate."""
    try:
        action()
    except FsdpInspectError as error:
        return str(error)
    return None


SHARED = {
    "annotations": lambda: {"segments": [], "external_annotations": [{"stage": "OTHER"}] * 2000},
    "trace entries": lambda: {"segments": [], "device_traces": [[{"action": "snapshot"}] * 2000]},
    "blocks": lambda: {"segments": [{"total_size": 0, "blocks": [{}] * 1001}]},
}


@pytest.mark.parametrize("make", SHARED.values(), ids=SHARED.keys())
def test_one_thing_listed_very_often_is_refused(tmp_path, monkeypatch, make):
    monkeypatch.setattr("fsdp_inspect.importing.snapshot_contents.MAX_ROWS", 1000)
    path = tmp_path / "shared.pickle"
    path.write_bytes(pickle.dumps(make()))
    with pytest.raises(CorruptFileError, match="lists over 1,000"):
        import_snapshot(path, tmp_path / "run")


def import_bytes(data, folder):
    path = folder / "it.pickle"
    path.write_bytes(data)
    run = folder / "run"
    refusal = refusal_of(lambda: import_snapshot(path, run))
    if refusal is not None:
        assert len(refusal.split(". ")) >= 2
        assert not run.exists()
        return False
    for file in sorted(run.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    run.rmdir()
    return True


def test_a_snapshot_cut_off_anywhere_leaves_nothing_behind(tmp_path):
    assert import_bytes(SNAPSHOT, tmp_path)
    for length in range(0, len(SNAPSHOT), 97):
        assert not import_bytes(SNAPSHOT[:length], tmp_path)


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(SNAPSHOT) - 1), st.binary(max_size=3)), max_size=4))
def test_a_damaged_snapshot_is_imported_or_refused_in_words(tmp_path_factory, damage):
    data = bytearray(SNAPSHOT)
    for place, written in damage:
        data[place : place + len(written)] = written
    import_bytes(bytes(data), tmp_path_factory.mktemp("damaged"))


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused_in_words(tail):
    refusal = refusal_of(lambda: read_plain_pickle(b"\x80\x04" + tail, "it"))
    assert refusal is None or "Expected" in refusal


values = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=5)
    | st.lists(st.integers(), max_size=2)
)


@st.composite
def nearly_snapshots(draw):
    """A snapshot in which any one value has been replaced."""
    snapshot = pickle.loads(SNAPSHOT)
    holders = [snapshot, *snapshot["segments"], *snapshot["device_traces"][0]]
    holders += [block for segment in snapshot["segments"] for block in segment["blocks"]]
    holders += snapshot["external_annotations"]
    holder = draw(st.sampled_from(holders))
    holder[draw(st.sampled_from(sorted(holder)))] = draw(values)
    return snapshot


@settings(max_examples=examples(50), deadline=None)
@given(nearly_snapshots())
def test_a_snapshot_with_an_impossible_value_is_imported_or_refused_in_words(
    tmp_path_factory, snapshot
):
    if snapshot.get("segments") is None or all(abs(n) < 2**100 for n in integers_in(snapshot)):
        import_bytes(pickle.dumps(snapshot, protocol=4), tmp_path_factory.mktemp("odd"))


def integers_in(value):
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [number for item in value for number in integers_in(item)]
    return [value] if isinstance(value, int) else []


def test_every_instruction_that_torch_writes_is_known():
    """The instructions that `_dump_snapshot` writes, for all protocols of Python since 2.0."""
    for protocol in (2, 3, 4, 5):
        file = io.BytesIO(pickle.dumps(pickle.loads(SNAPSHOT), protocol=protocol))
        assert {opcode.name for opcode, _, _ in pickletools.genops(file)}
        assert read_plain_pickle(file.getvalue(), "it") == pickle.loads(SNAPSHOT)
