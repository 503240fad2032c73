"""Chakra execution traces: read with a decoder of their own, and by Chakra's own tools.

`make chakra` installs Chakra, which is not on PyPI, and sets `FSDP_INSPECT_CHAKRA` to its commands.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fsdp_inspect.errors import ExportError, MissingDataError
from fsdp_inspect.report.chakra import write_chakra
from fsdp_inspect.report.selection import select
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.codes import EventKind
from tests.builders import RunBuilder, steady_run, write_run
from tests.conftest import Invoke

SAMPLES = Path(__file__).parents[2] / "samples"
CHAKRA = os.environ.get("FSDP_INSPECT_CHAKRA", "")
COMMUNICATION = {"0": "all_reduce", "2": "all_gather", "7": "reduce_scatter"}
"""The names of `CollectiveCommType` in Chakra's schema."""


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a protobuf message: numbers and texts."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        value, at = _varint(data, at)
        if key & 7 == 2:
            yield key >> 3, data[at : at + value]
            at += value
        else:
            assert key & 7 == 0
            yield key >> 3, value


def _attributes(fields: list[tuple[int, Any]], number: int) -> dict[str, Any]:
    found = {}
    for name, value in (list(_fields(each)) for key, each in fields if key == number):
        assert name[0] == 1
        found[name[1].decode()] = value[1].decode() if value[0] == 29 else value[1]
    return found


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The metadata and the nodes of a trace, with the numbers of Chakra's et_def.proto."""
    data, at, messages = path.read_bytes(), 0, []
    while at < len(data):
        size, at = _varint(data, at)
        messages.append(list(_fields(data[at : at + size])))
        at += size
    nodes = []
    for fields in messages[1:]:
        one = dict(fields)
        after: list[int] = []
        packed = one.get(5, b"")
        place = 0
        while place < len(packed):
            number, place = _varint(packed, place)
            after.append(number)
        nodes.append(
            {
                "id": one.get(1, 0), "name": one[2].decode(), "type": one[3], "after": after,
                "start": one.get(6, 0), "duration": one.get(7, 0), **_attributes(fields, 10),
            }
        )  # fmt: skip
    return _attributes(messages[0], 2), nodes


def export(name: str, folder: Path, **chosen: Any) -> Any:
    run = open_run(SAMPLES / name)
    selection = select(run, ranks=chosen.get("ranks"), steps=chosen.get("steps"))
    folder.mkdir(exist_ok=True)
    return run, write_chakra(run, selection, folder, place=folder)


def replay(nodes: list[dict[str, Any]]) -> int:
    """The end of the last node, in µs: compute one by one, as a simulator replays."""
    ends: dict[int, int] = {}
    busy = 0
    for node in nodes:
        begin = max((ends[each] for each in node["after"]), default=0)
        if node["type"] == 4:
            begin = max(begin, busy)
            busy = begin + node["duration"]
        ends[node["id"]] = begin + node["duration"]
    return max(ends.values())


def test_each_rank_has_the_collectives_of_the_step_with_sizes_and_groups(tmp_path: Path) -> None:
    run, written = export("hsdp-4-ranks", tmp_path, steps=[6])
    groups = json.loads((tmp_path / "comm_groups.json").read_text())
    for rank in range(4):
        about, nodes = read(tmp_path / f"step.{rank}.et")
        assert (about["run"], about["step"], about["rank"]) == ("hsdp-4-ranks", 6, rank)
        found = sorted(
            (COMMUNICATION[str(node["comm_type"])], node["comm_size"], *groups[node["pg_name"]])
            for node in nodes
            if node["type"] == 7
        )
        shard = (0, 1) if rank < 2 else (2, 3)
        replicas = (0, 2) if rank % 2 == 0 else (1, 3)
        expected = []
        events = run.events(rank, steps=[6])
        for kind, size, group in zip(
            events.kind.tolist(), events.bytes.tolist(), events.group.tolist(), strict=True
        ):
            if kind in (EventKind.ALL_GATHER, EventKind.REDUCE_SCATTER):
                share = 2 if kind == EventKind.ALL_GATHER else 1
                expected.append((EventKind(kind).label, size // share, *shard))
            elif kind == EventKind.ALL_REDUCE:
                members = {0: shard, 1: replicas, 2: (0, 1, 2, 3)}[group]
                expected.append((EventKind(kind).label, size, *members))
        assert found == sorted(expected)
        assert all(node["is_cpu_op"] == 0 for node in nodes)
        assert all(set(node["after"]) <= set(range(node["id"])) for node in nodes)
        step_us = (events.end_ns - events.start_ns)[events.kind == EventKind.STEP] / 1000
        assert replay(nodes) == pytest.approx(step_us[0], abs=len(nodes))
    assert written.missing_ranks == ()


def test_a_trace_of_some_ranks_says_which_a_simulator_lacks(tmp_path: Path, invoke: Invoke) -> None:
    out = tmp_path / "traces"
    ended = invoke("export", SAMPLES / "emulated-8-ranks-cuda", "chakra", "--out", out)
    said = " ".join(ended.out.split())
    assert ended.code == 0
    assert "A simulator needs all ranks. Not written: 1-7." in said
    assert "Replayed with the recorded durations, the step takes" in said
    assert sorted(each.name for each in out.iterdir()) == ["comm_groups.json", "step.0.et"]


def test_several_steps_and_unknown_collectives_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="2 steps are chosen"):
        export("tiny-2-ranks", tmp_path, steps=[5, 6])
    run = steady_run()  # its all-reduce has a process group that the manifest lacks
    with pytest.raises(MissingDataError, match="its process group is unknown"):
        write_chakra(run, select(run, ranks=None, steps=[2]), tmp_path, place=tmp_path)
    builder = RunBuilder()
    builder.rank(0).step(0, 0, 100)
    builder.rank(0).add(EventKind.POINT_TO_POINT, 10, 20, group=0, bytes=4)
    run = builder.build()
    with pytest.raises(MissingDataError, match="needs the peers, which are not recorded"):
        write_chakra(run, select(run, ranks=None, steps=[0]), tmp_path, place=tmp_path)


def test_without_protobuf_the_export_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "google.protobuf.descriptor_pb2", None)
    with pytest.raises(ExportError, match=r"pip install 'fsdp-inspect\[chakra\]'"):
        export("tiny-2-ranks", tmp_path)


@pytest.mark.skipif(not CHAKRA, reason="Chakra is not installed: run `make chakra`")
def test_chakras_own_tools_read_the_traces(tmp_path: Path, invoke: Invoke) -> None:
    out = tmp_path / "traces"
    folder = write_run(open_steady(), tmp_path / "run")
    assert invoke("export", folder, "chakra", "--steps", 2, "--out", out).code == 0
    _, nodes = read(out / "step.0.et")
    for command, name in (("chakra_jsonizer", "t.json"), ("chakra_visualizer", "t.graphml")):
        subprocess.run(
            [Path(CHAKRA) / command, "--input_filename", out / "step.0.et", "--output_filename",
             tmp_path / name], check=True, timeout=120,
        )  # fmt: skip
    decoder, text, found = json.JSONDecoder(), (tmp_path / "t.json").read_text(), []
    while text:
        one, end = decoder.raw_decode(text)
        found.append(one)
        text = text[end:].lstrip()
    assert found[0]["version"] == "1.0.0"
    assert [each["name"] for each in found[1:]] == [each["name"] for each in nodes]
    assert [[*map(int, each.get("dataDeps", []))] for each in found[1:]] == [
        each["after"] for each in nodes
    ]
    assert {each["type"] for each in found[1:]} == {"COMP_NODE", "COMM_COLL_NODE"}
    sizes = [
        int(value["int64Val"])
        for each in found[1:]
        for value in each["attr"]
        if value["name"] == "comm_size"
    ]
    assert sizes == [each["comm_size"] for each in nodes if each["type"] == 7]
    assert (tmp_path / "t.graphml").read_text().count("<edge ") == sum(
        len(each["after"]) for each in nodes
    )


def open_steady() -> Any:
    """The steady run with the process group of its all-reduce."""
    from fsdp_inspect.trace.run import ProcessGroup

    groups = [
        ProcessGroup(index=0, name="shard", ranks=[0, 1], role="shard"),
        ProcessGroup(index=1, name="world", ranks=[0, 1], role="other"),
    ]
    return steady_run(process_groups=groups)
