"""Write a recorded step as Chakra execution traces, which simulators of clusters replay.

Each rank is one file, `step.RANK.et`: a message `GlobalMetadata`, then one message `Node` for each
piece of compute and each collective of `analysis.step_graph`. The length of a message precedes it.
`comm_groups.json` lists the ranks of each process group, as ASTRA-sim reads them. Sizes are bytes
of a rank's input, times are µs since the start of the rank's step. Source: mlcommons/chakra,
schema/protobuf/et_def.proto and src/feeder (2026-05).
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

from fsdp_inspect.analysis.shared_collectives import Matching
from fsdp_inspect.analysis.step_graph import GraphNode, StepGraph, measure_step_graph
from fsdp_inspect.analysis.step_selection import inspected_rank
from fsdp_inspect.errors import ExportError, MissingDataError
from fsdp_inspect.formatting import format_unit
from fsdp_inspect.report.selection import Selection
from fsdp_inspect.trace.codes import EventKind, Phase
from fsdp_inspect.trace.run import RunSource
from fsdp_inspect.version import __version__

_COMPUTE, _COLLECTIVE = 4, 7
"""Values of `NodeType`."""
_COMM_TYPES = {
    EventKind.ALL_REDUCE: 0,
    EventKind.ALL_GATHER: 2,
    EventKind.BROADCAST: 5,
    EventKind.ALL_TO_ALL: 6,
    EventKind.REDUCE_SCATTER: 7,
    EventKind.BARRIER: 9,
}
"""Values of `CollectiveCommType`."""
_Groups = dict[tuple[int, tuple[int, ...]], int]
"""The number of each communicator: a process group of the manifest, and its ranks."""
_FIELDS: Mapping[str, tuple[tuple[str, int, str], ...]] = {
    "AttributeProto": (
        ("name", 1, "string"),
        ("int64_val", 9, "int64"),
        ("bool_val", 27, "bool"),
        ("string_val", 29, "string"),
    ),
    "GlobalMetadata": (("version", 1, "string"), ("attr", 2, "AttributeProto")),
    "Node": (
        ("id", 1, "uint64"),
        ("name", 2, "string"),
        ("type", 3, "int32"),
        ("data_deps", 5, "uint64s"),
        ("start_time_micros", 6, "uint64"),
        ("duration_micros", 7, "uint64"),
        ("attr", 10, "AttributeProto"),
    ),
}
"""The fields of Chakra's messages that are written: name, number and type."""


@dataclass(frozen=True, slots=True)
class ChakraExport:
    """The written traces of one step."""

    path: Path
    step: int
    ranks: tuple[int, ...]
    missing_ranks: tuple[int, ...]
    """Ranks that are not recorded or not chosen. A simulator needs all."""
    num_nodes: int
    num_collectives: int
    step_time_ns: int
    """The longest recorded step of the ranks."""
    replayed_ns: int
    """The same rank's step, replayed from its graph with the recorded durations."""


def write_chakra(
    run: RunSource,
    selection: Selection,
    path: Path,
    *,
    place: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ChakraExport:
    """Write one step of some ranks.

    Args:
        run: A recorded run.
        selection: The ranks, and at most one step; default: the typical step of the median rank.
        path: The folder to state in the result.
        place: The folder to write to.
        progress: Called after each rank.

    Raises:
        ExportError: protobuf is not installed, or several steps are chosen.
        MissingDataError: The step cannot be arranged as a graph, or has collectives that Chakra
            cannot describe.
    """
    write = _load_writer()
    step = _choose_step(run, selection)
    fqns = {each.index: format_unit(each.fqn) for each in run.manifest.units}
    groups: _Groups = {}
    graphs, num_nodes, num_collectives = [], 0, 0
    for done, rank in enumerate(selection.ranks, start=1):
        graph = measure_step_graph(run, rank, step)
        with (place / f"step.{rank}.et").open("wb") as stream:
            write(stream, "GlobalMetadata", _describe(run, graph))
            for number, node in enumerate(graph.nodes):
                write(stream, "Node", _describe_node(run, graph, number, fqns, groups))
                num_collectives += node.is_collective
        num_nodes += len(graph.nodes)
        graphs.append((graph.step_time_ns, graph.replayed_ns))
        progress(done, len(selection.ranks))
    named = {str(number): list(members) for (_, members), number in groups.items()}
    (place / "comm_groups.json").write_text(json.dumps(named, indent=1), encoding="utf-8")
    step_time_ns, replayed_ns = max(graphs)
    return ChakraExport(
        path=path,
        step=step,
        ranks=selection.ranks,
        missing_ranks=tuple(sorted({*range(run.manifest.world_size)} - {*selection.ranks})),
        num_nodes=num_nodes,
        num_collectives=num_collectives,
        step_time_ns=step_time_ns,
        replayed_ns=replayed_ns,
    )


def _choose_step(run: RunSource, selection: Selection) -> int:
    if selection.steps is None:
        member = inspected_rank(run, None)
        if member is None or len(member.typical_steps) == 0:
            raise MissingDataError(
                f"Run {run.manifest.run_id!r} has no timed step. Expected at least one finished "
                "step past warm-up. Choose another one with --steps."
            )
        return member.closest_step
    if len(selection.steps) != 1:
        raise ExportError(
            f"{len(selection.steps)} steps are chosen. Expected one: a Chakra trace has one step. "
            f"Use, for example, --steps {min(selection.steps)}."
        )
    return min(selection.steps)


def _describe(run: RunSource, graph: StepGraph) -> dict[str, Any]:
    values: dict[str, bool | int | str] = {
        "schema": "1.0.2-chakra.1.0.0",
        "source": f"fsdp-inspect {__version__}",
        "run": run.manifest.run_id,
        "step": graph.step,
        "rank": graph.rank,
    }
    return {"version": "1.0.0", "attr": [*_attributes(values)]}


def _attributes(values: Mapping[str, bool | int | str]) -> Iterator[dict[str, Any]]:
    kinds = {bool: "bool_val", int: "int64_val", str: "string_val"}
    for name, value in values.items():
        yield {"name": name, kinds[type(value)]: value}


def _describe_node(
    run: RunSource, graph: StepGraph, number: int, fqns: Mapping[int, str], groups: _Groups
) -> dict[str, Any]:
    node, events = graph.nodes[number], graph.events
    unit, phase = int(events.unit[node.event]), Phase(int(events.phase[node.event])).label
    kind = EventKind(int(events.kind[node.event]))
    values: dict[str, bool | int | str] = {"is_cpu_op": False, "phase": phase}
    if unit in fqns:
        values["unit"] = fqns[unit]
    if node.is_collective:
        values |= _describe_collective(run, graph, node, kind, groups)
    begin = "COMM_COLL_NODE" if node.is_collective else "COMP_NODE"
    end_ns = node.start_ns + node.duration_ns
    return {
        "id": number,
        "name": " ".join([begin, kind.label, *([fqns[unit]] if unit in fqns else [])]),
        "type": _COLLECTIVE if node.is_collective else _COMPUTE,
        "data_deps": [*node.after],
        "start_time_micros": _us(node.start_ns),
        "duration_micros": _us(end_ns) - _us(node.start_ns),
        "attr": [*_attributes(values)],
    }


def _describe_collective(
    run: RunSource, graph: StepGraph, node: GraphNode, kind: EventKind, groups: _Groups
) -> dict[str, int | str]:
    size, group = int(graph.events.bytes[node.event]), int(graph.events.group[node.event])
    matching = Matching(run.manifest.process_groups, run.manifest.world_size)
    members = matching.members(group, graph.rank)
    reason = ""
    if kind not in _COMM_TYPES:
        reason = "Chakra has no collective of this kind, or needs the peers, which are not recorded"
    elif not members:
        reason = "its process group is unknown"
    elif size < 0 and kind is not EventKind.BARRIER:
        reason = "its size is unknown"
    if reason:
        raise MissingDataError(
            f"A collective ({kind.label.replace('_', '-')}) in step {graph.step} of rank "
            f"{graph.rank} of run {run.manifest.run_id!r} cannot be written: {reason}. Expected "
            "collectives of known kind, size and group. Choose another step or run."
        )
    if kind is EventKind.ALL_GATHER:
        size //= len(members)
    number = groups.setdefault((group, members), len(groups) + 1)  # ASTRA-sim: 0 is all ranks
    return {"comm_type": _COMM_TYPES[kind], "comm_size": max(size, 0), "pg_name": str(number)}


def _us(time_ns: int) -> int:
    return round(time_ns / 1000)


def _load_writer() -> Callable[[BinaryIO, str, dict[str, Any]], None]:
    """A function that writes a message of Chakra with its length.

    Raises:
        ExportError: The package protobuf is not installed.
    """
    try:
        descriptors = import_module("google.protobuf.descriptor_pb2")
        pools = import_module("google.protobuf.descriptor_pool")
        factory = import_module("google.protobuf.message_factory")
        delimited = import_module("google.protobuf.proto")
    except ImportError as error:
        raise ExportError(
            f"Chakra traces need the package protobuf, which cannot be imported: {error}. Expected "
            "fsdp-inspect with the extra chakra. Run pip install 'fsdp-inspect[chakra]'."
        ) from error
    file = descriptors.FileDescriptorProto(
        name="et_def.proto", package="ChakraProtoMsg", syntax="proto3"
    )
    for message, fields in _FIELDS.items():
        described = file.message_type.add(name=message)
        if message == "AttributeProto":
            described.oneof_decl.add(name="value")
        for name, number, kind in fields:
            one = described.field.add(name=name, number=number)
            is_message = kind in _FIELDS
            one.label = (
                one.LABEL_REPEATED if is_message or kind == "uint64s" else one.LABEL_OPTIONAL
            )
            one.type = one.Type.Value(
                "TYPE_MESSAGE" if is_message else f"TYPE_{kind.removesuffix('s').upper()}"
            )
            if name.endswith("_val"):
                one.oneof_index = 0
            if is_message:
                one.type_name = f".ChakraProtoMsg.{kind}"
    pool = pools.DescriptorPool()
    pool.Add(file)
    types = {
        message: factory.GetMessageClass(pool.FindMessageTypeByName(f"ChakraProtoMsg.{message}"))
        for message in _FIELDS
    }

    def write(stream: BinaryIO, message: str, values: dict[str, Any]) -> None:
        delimited.serialize_length_prefixed(types[message](**values), stream)

    return write
