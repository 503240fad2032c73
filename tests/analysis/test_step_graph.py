"""A step as a graph: what each piece of compute and each collective follows."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fsdp_inspect.analysis.step_graph import StepGraph, measure_step_graph
from fsdp_inspect.errors import MissingDataError
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.codes import EventKind, Phase, Stream
from tests.builders import STEADY_STEP_NS, RunBuilder, steady_run

SAMPLES = Path(__file__).parents[2] / "samples"


def names(graph: StepGraph) -> list[tuple[str, int, int, set[str]]]:
    """Each node: kind and unit with its number among equal ones, start, duration, predecessors."""
    found: list[str] = []
    for node in graph.nodes:
        kind = EventKind(int(graph.events.kind[node.event])).label
        name = f"{kind} {graph.events.unit[node.event]}"
        found.append(f"{name} #{sum(each.startswith(name) for each in found)}")
    return [
        (name, node.start_ns, node.duration_ns, {found[each] for each in node.after})
        for name, node in zip(found, graph.nodes, strict=True)
    ]


def test_on_a_cpu_a_collective_follows_the_code_that_issues_it_and_compute_its_waits() -> None:
    graph = measure_step_graph(steady_run(), rank=0, step=2)
    nodes = {name: rest for name, *rest in names(graph)}
    assert graph.replayed_ns == graph.step_time_ns == STEADY_STEP_NS
    assert nodes["all_gather 0 #0"] == [50, 50, {"data -1 #0"}]
    assert nodes["all_gather_copy_out 0 #0"] == [100, 10, {"all_gather 0 #0", "data -1 #0"}]
    # Prefetched: issued after the copy-out of unit 0, needed after the forward of unit 0.
    assert nodes["all_gather 1 #0"] == [
        110, 150, {"all_gather_copy_out 0 #0", "all_gather 0 #0"}
    ]  # fmt: skip
    assert nodes["forward 0 #0"] == [110, 100, {"all_gather_copy_out 0 #0"}]
    assert nodes["all_gather_copy_out 1 #0"] == [260, 10, {"forward 0 #0", "all_gather 1 #0"}]
    # The reduce-scatter of unit 1 begins after its backward and ends beside that of unit 0.
    assert "backward 1 #1" in nodes["reduce_scatter 1 #0"][2]
    # The all-gather of unit 0 is hidden, and its backward still needs it.
    assert nodes["backward 0 #0"][2] == {"backward 1 #1", "all_gather 0 #1"}


def test_without_communication_the_graph_takes_the_time_of_the_clock_outside_waits() -> None:
    graph = measure_step_graph(steady_run(), rank=0, step=2)
    free = [replace(node, duration_ns=0) if node.is_collective else node for node in graph.nodes]
    # The steady step has 130 ns, 100 ns and 20 ns of exposed communication.
    assert replace(graph, nodes=tuple(free)).replayed_ns == STEADY_STEP_NS - 250
    slow = [
        replace(node, duration_ns=node.duration_ns + 1000 * node.is_collective)
        for node in graph.nodes
    ]
    assert replace(graph, nodes=tuple(slow)).replayed_ns > STEADY_STEP_NS + 4 * 1000


def test_on_streams_an_all_gather_follows_copy_outs_and_not_the_compute_beside_it() -> None:
    builder = RunBuilder(units=("a", "b", "c"))
    rank = builder.rank(0)
    rank.step(0, 0, 1000)
    clock = {"stream": int(Stream.COMPUTE)}
    begin = 100
    for number, unit in enumerate("abc"):
        gathered = {"collective": number, "issue_ns": 10 + number}
        # A slow network: each all-gather begins as the previous one ends.
        rank.all_gather(unit, begin - 100, begin, need=begin - 20, **gathered)
        copied = {**clock, "unit": unit, "phase": Phase.FORWARD, "issue_ns": 10 + number}
        rank.add(EventKind.ALL_GATHER_COPY_OUT, begin, begin + 5, **copied)
        rank.forward(unit, begin + 5, begin + 80, issue_ns=10 + number, **clock)
        begin += 100
    for kind in (EventKind.REDUCE_SCATTER, EventKind.ALL_REDUCE):
        late = kind == EventKind.ALL_REDUCE
        rank.add(
            kind, 500 + 100 * late, 600 + 100 * late, unit="c", phase=Phase.BACKWARD,
            stream=int(Stream.REDUCE_SCATTER), group=int(late), issue_ns=20, need_ns=900,
        )  # fmt: skip
    rank.backward("c", 400, 500, issue_ns=15, **clock)
    nodes = {name: rest for name, *rest in names(measure_step_graph(builder.build(), 0, 0))}
    # Torch lets the all-gather of c wait for the copy-out of a, and not for the forward of a.
    assert nodes["all_gather 2 #0"][2] == {"all_gather 1 #0", "all_gather_copy_out 0 #0"}
    assert nodes["reduce_scatter 2 #0"][2] == {"all_gather 2 #0", "backward 2 #0"}
    assert nodes["all_reduce 2 #0"][2] == {"backward 2 #0", "reduce_scatter 2 #0"}


def test_on_streams_an_all_reduce_of_a_bucket_follows_the_backward_and_not_its_early_issue() -> (
    None
):
    builder = RunBuilder(units=("a",))
    rank = builder.rank(0)
    rank.step(0, 0, 1000)
    clock = {"stream": int(Stream.COMPUTE)}
    rank.forward("a", 100, 300, issue_ns=5, **clock)
    rank.backward("a", 300, 600, issue_ns=10, **clock)
    rank.all_reduce("a", 600, 800, need=700, issue_ns=20)
    nodes = {name: rest for name, *rest in names(measure_step_graph(builder.build(), 0, 0))}
    assert nodes["all_reduce 0 #0"] == [600, 200, {"backward 0 #0"}]


@pytest.mark.parametrize("name", ["async-prefetch-2-ranks", "hsdp-4-ranks", "tiny-2-ranks"])
def test_the_graph_of_a_recorded_step_on_cpu_takes_exactly_its_time(name: str) -> None:
    run = open_run(SAMPLES / name)
    for record in run.ranks:
        graph = measure_step_graph(run, record.rank, 6)
        assert graph.replayed_ns == graph.step_time_ns
        collectives = [node for node in graph.nodes if node.is_collective]
        kinds = graph.events.kind[[node.event for node in collectives]]
        assert (kinds == EventKind.ALL_GATHER).sum() == (
            run.events(record.rank, steps=[6]).kind == EventKind.ALL_GATHER
        ).sum()
        assert np.all(
            np.diff([node.start_ns for node in graph.nodes if not node.is_collective]) > 0
        )


def test_the_graph_of_an_emulated_step_on_streams_takes_nearly_its_time() -> None:
    run = open_run(SAMPLES / "emulated-8-ranks-cuda")
    for step in range(4, 25):
        graph = measure_step_graph(run, 0, step)
        assert graph.replayed_ns == pytest.approx(graph.step_time_ns, rel=0.02)


def test_a_plain_or_unfinished_step_is_refused() -> None:
    builder = RunBuilder()
    builder.rank(0).step(0, 0, 100, is_plain=True)
    builder.rank(0).step(1, 100, 100)
    run = builder.build()
    with pytest.raises(MissingDataError, match="is a plain step without units"):
        measure_step_graph(run, 0, 0)
    with pytest.raises(MissingDataError, match="has no recorded end"):
        measure_step_graph(run, 0, 1)


def test_an_imported_step_whose_waits_are_unknown_is_refused() -> None:
    builder = RunBuilder()
    rank = builder.rank(0)
    rank.step(0, 0, 100)
    rank.add(EventKind.COMPUTE, 0, 50, stream=int(Stream.COMPUTE))
    rank.all_reduce(None, 20, 80)
    with pytest.raises(MissingDataError, match="1 of its collectives do not say where compute"):
        measure_step_graph(builder.build(), 0, 0)
