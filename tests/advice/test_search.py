"""The search over the kept memory: a share within a node, or fewer activations."""

from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_inspect.advice import code_change
from fsdp_inspect.advice.plan_scores import PlanScorer
from fsdp_inspect.advice.plan_space import ROOT_PARTS, Choice, Space, make_space
from fsdp_inspect.advice.request import AdviceRequest
from fsdp_inspect.advice.search import Search, SearchResult
from fsdp_inspect.simulation.memory import PieceMemory
from fsdp_inspect.simulation.network import CostLine, Network, Node, NodeLink
from fsdp_inspect.simulation.workload import UnitPolicy
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.codes import EventKind
from tests.builders import RunBuilder
from tests.simulation.test_smaller_groups import (
    INSIDE,
    MS,
    RANKS,
    SIZE,
    block,
    plan,
    recorded,
)

SLOW = CostLine(MS, 0.03e9)
BETWEEN_NODES = Network(
    {EventKind.ALL_GATHER: SLOW, EventKind.REDUCE_SCATTER: SLOW}, node=Node(4, INSIDE)
)


def bench_on(
    monkeypatch: pytest.MonkeyPatch,
    network: Network = BETWEEN_NODES,
    *,
    kept: int = 0,
    node: NodeLink | None = None,
    tells_parts: bool = True,
) -> PlanScorer:
    """A scorer of a run whose gathers take 24 ms each; blocks keep `kept` bytes for backward.

    Without `tells_parts`, the run does not contain which part of them is the output.
    """
    work, manifest = recorded(network)
    duration = network.duration_ns(EventKind.ALL_GATHER, SIZE, RANKS) or 0
    units = [replace(own, gather_ns=duration, reduce_ns=duration) for own in work.workload.units]
    memory = work.workload.memory
    assert memory is not None
    pieces = [replace(each, kept=kept, output=kept // 10) for each in memory.pieces]
    if not tells_parts:
        pieces = [PieceMemory(kept=each.kept, gradients=each.gradients) for each in pieces]
    workload = replace(work.workload, units=units, memory=replace(memory, pieces=pieces))
    slow = replace(work, workload=workload)
    slow = replace(slow, step_time_ns=slow.simulate().duration_ns)
    monkeypatch.setattr("fsdp_inspect.advice.plan_scores.measure_work", lambda run: slow)
    run = replace(RunBuilder([], world_size=RANKS).build(), manifest=manifest)
    return PlanScorer(run, node=node)


def search(scorer: PlanScorer, limit: int | None) -> SearchResult:
    return Search(scorer, AdviceRequest(memory_limit=limit), memory_margin=0.0).run()


def test_a_slow_network_between_nodes_gives_a_share_within_each_node(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("tests.simulation.test_smaller_groups.NUM_BLOCKS", 16)
    scorer = bench_on(monkeypatch)
    whole, shared = (scorer.score(Choice(reshard=value)).peak_bytes for value in (False, 4))
    assert whole is not None
    assert shared is not None
    assert whole > shared
    found = search(scorer, shared)
    assert found.fits
    assert found.fastest.reshard == 4
    assert scorer.score(found.fastest).step_ns < 0.8 * scorer.recorded.step_ns


def test_one_unit_has_no_other_unit_to_prefetch(monkeypatch: pytest.MonkeyPatch):
    scorer = bench_on(monkeypatch)
    search(scorer, None)
    alone = [each for each in scorer.scores if each.grouping == "make the whole model one unit"]
    assert alone
    assert all(each.effort[1] == 0 for each in alone)


def test_smaller_groups_are_not_played_where_all_ranks_share_a_node(
    monkeypatch: pytest.MonkeyPatch,
):
    scorer = bench_on(monkeypatch, replace(BETWEEN_NODES, node=Node(RANKS, INSIDE)))
    search(scorer, None)
    assert {choice.reshard for choice in scorer.scores} == {None, True, False}


def test_a_node_whose_link_is_not_known_is_played_once_the_user_says_it(
    monkeypatch: pytest.MonkeyPatch,
):
    unknown = replace(BETWEEN_NODES, node=Node(4))
    scorer = bench_on(monkeypatch, unknown)
    assert scorer.lacks_node_link
    search(scorer, None)
    assert all(choice.reshard in (None, True, False) for choice in scorer.scores)
    told = bench_on(monkeypatch, unknown, node=NodeLink(1e9, 0.0))
    assert not told.lacks_node_link
    search(told, None)
    assert 4 in {choice.reshard for choice in told.scores}


def test_no_plan_of_the_same_memory_is_clearly_faster_than_the_alternative(
    monkeypatch: pytest.MonkeyPatch,
):
    scorer = bench_on(monkeypatch, kept=20 * SIZE)
    searched = Search(scorer, AdviceRequest(), memory_margin=0.0)
    chosen = scorer.score(searched.run().smallest)
    peak = chosen.peak_bytes
    assert peak is not None
    for score in scorer.scores.values():
        if score.peak_bytes is not None and score.peak_bytes <= peak:
            assert score.cautious_ns >= chosen.cautious_ns - searched.noise_ns


def test_activations_that_do_not_fit_are_forgotten(monkeypatch: pytest.MonkeyPatch):
    scorer = bench_on(monkeypatch, kept=20 * SIZE)
    alone = scorer.score(Choice(checkpointing="full"))
    assert alone.peak_bytes is not None
    found = search(scorer, alone.peak_bytes + SIZE)
    assert found.fits
    assert found.fastest.checkpointing == "full"
    assert scorer.score(found.fastest).step_ns < alone.step_ns  # together with the other gains


def test_without_a_limit_nothing_is_checkpointed(monkeypatch: pytest.MonkeyPatch):
    scorer = bench_on(monkeypatch, kept=20 * SIZE)
    search(scorer, None)
    assert all(choice.checkpointing is None for choice in scorer.scores)


def test_activations_whose_part_a_run_does_not_tell_are_not_guessed(
    monkeypatch: pytest.MonkeyPatch,
):
    scorer = bench_on(monkeypatch, kept=20 * SIZE, tells_parts=False)
    assert not search(scorer, 10 * SIZE).fits
    assert all(choice.checkpointing is None for choice in scorer.scores)


def space_with_root(**changes: object) -> Space:
    """The plans to try for blocks in a root that owns an embedding, a norm and a head."""
    work, _ = recorded()
    fields: dict[str, object] = {
        "fqn": "",
        "modules": [""],
        "is_root": True,
        "tied": [],
        "parameters": {
            "emb.weight": [800, 250],
            "norm.weight": [250],
            "head.weight": [800, 250],
        },
    }
    root = block(len(work.units), **{**fields, **changes})
    workload = replace(
        work.workload,
        units=[*work.workload.units, work.workload.units[0]],
        policies=[*work.workload.policies, UnitPolicy(reshard_after_forward=True)],
    )
    return make_space(replace(work, units=(*work.units, root), workload=workload), plan())


def test_large_modules_of_the_root_become_units_around_the_blocks():
    space = space_with_root()
    name = f"{ROOT_PARTS} (emb; norm, head)"
    assert space.rules[name] == "R3"
    order = [unit.modules for unit in space.groupings[name].units]
    blocks = [(f"layers.{at}",) for at in range(4)]
    assert order == [("",), ("emb",), *blocks, ("norm", "head")]


@pytest.mark.parametrize("tied", [["emb.weight"], None])
def test_a_tied_or_perhaps_tied_embedding_stays_in_the_root(tied: list[str] | None):
    found = [name for name in space_with_root(tied=tied).groupings if name.startswith(ROOT_PARTS)]
    assert found == ([f"{ROOT_PARTS} (norm, head)"] if tied else [])


def test_a_root_that_reshards_may_stay_unsharded():
    space = space_with_root()
    assert space.reshards_root
    kept = space.plan_of(Choice(keep_root=True))
    assert kept.unit("").reshard_after_forward is False
    assert kept.unit("layers.0").reshard_after_forward is True


@pytest.mark.parametrize("is_of_trainer", [True, False])
def test_parameters_are_kept_between_microbatches_only_if_the_loop_follows_the_plan(
    monkeypatch, is_of_trainer
):
    """Else they miss the update of the optimizer, without an error."""
    if not is_of_trainer:
        monkeypatch.setattr(code_change, "TRAINER", "another.program")
    scorer = PlanScorer(open_run(Path("samples/hsdp-4-ranks")))
    Search(scorer, AdviceRequest()).run()
    assert scorer.space.plan.accumulation.microbatches == 2
    assert any(each.keep_between_microbatches for each in scorer.scores) == is_of_trainer
    assert any("miss the update" in each for each in scorer.refusals) != is_of_trainer
