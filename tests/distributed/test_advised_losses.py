"""A training with a change that `advise` prints has the losses of the training without it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest

from fsdp_inspect.advice.plan_scores import AS_RECORDED, PlanScorer
from fsdp_inspect.advice.plan_space import Choice
from fsdp_inspect.advice.snippets import write_snippet
from fsdp_inspect.run import open_run
from fsdp_inspect.trace.plan import Plan
from tests.conftest import Torchrun
from tests.distributed.advised_script import LOOPS, Advised

pytestmark = pytest.mark.distributed

SCRIPT = Path(__file__).with_name("advised_script.py")
QUICK = ("microbatches", "teacher", "ddp")
HARMFUL = "not offered"
VALUES: dict[str, tuple[Any, ...]] = {
    "reshard": (False, True, 2),
    "num_kept": (1, 2),
    "keep_root": (True,),
    "forward_prefetch": (1, 2),
    "backward_prefetch": (1, 2),
    "prefetch_moment": ("BACKWARD_PRE",),
    "reduce_buffers": (2,),
    "separate_reduce_group": (True,),
    "async_gathers": (True,),
    "embedding_in_backward": (False,),
    "accumulation_sync": ("last", "every"),
    "checkpointing": ("full",),
}
"""The settings of the search that must not change a loss, with values of them."""
LEFT_OUT = {
    "grouping": "each run has its own",
    "keep_between_microbatches": "only the trainer of this project is told so",
    "replicas": "two ranks cannot shard and replicate",
    "param_dtype": "it changes losses, and the advice says so",
    "reduce_dtype": "it changes losses, and the advice says so",
}


def test_every_setting_of_the_search_is_tried() -> None:
    assert VALUES.keys() | LEFT_OUT.keys() == {each.name for each in fields(Choice)}


def find_choices(scorer: PlanScorer) -> Iterator[Choice]:
    """The changes that the search may offer to a run."""
    for name in scorer.space.groupings:
        yield Choice(grouping=name)
    for name, values in VALUES.items():
        if name == "accumulation_sync" and scorer.space.plan.accumulation.microbatches < 2:
            continue
        for value in values:
            yield Choice(**{name: value})


def find_changes(folder: Path, loop: str) -> Iterator[Advised]:
    """The code and the plan of each change, and the code of each finding."""
    run = open_run(folder / loop)
    scorer = PlanScorer(run.source) if loop != "ddp" else None
    for choice in find_choices(scorer) if scorer else ():
        if scorer.score_all([choice]) and scorer.space.plan_of(choice) != scorer.space.plan:
            [setting] = choice.changed
            before, after = scorer.space.plan_of(AS_RECORDED), scorer.space.plan_of(choice)
            code = write_snippet(choice, before, after)
            if code and "similar calls" not in code:  # the plan file has them
                yield Advised(loop, setting, code=code)
            if after.fsdp1 is None and setting != "accumulation_sync":
                yield Advised(loop, setting, plan=after.to_toml())
    for finding in run.advise().findings:
        if finding.snippet:
            yield Advised(loop, finding.rule, code=finding.snippet)


Outcome = dict[str, Any]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((QUICK, 8), id="some"),
        pytest.param((LOOPS, 1), id="all", marks=pytest.mark.slow),
    ],
)
def outcomes(
    request: pytest.FixtureRequest, run_ranks: Torchrun, tmp_path_factory: pytest.TempPathFactory
) -> list[Outcome]:
    """Each change with its losses, and the losses of its loop without it.

    Each eighth change of some loops, or each change of all, with all findings; and one change that
    the search must not offer.
    """
    loops, every = request.param
    folder = tmp_path_factory.mktemp("advised")
    run_ranks(SCRIPT, folder, "record", *loops, num_ranks=2)
    changes = []
    for loop in loops:
        found = [*find_changes(folder, loop)]
        of_findings = [each for each in found if each.setting.startswith("R")]
        changes += dict.fromkeys([*found[::every], *of_findings])
    changes.append(keep_teacher(folder))
    listed = list(map(asdict, changes))
    (folder / "changes.json").write_text(json.dumps(listed))
    run_ranks(SCRIPT, folder, "train", *loops, num_ranks=2)
    losses = json.loads((folder / "losses.json").read_text())
    alone = {loop: each["losses"] for loop, each in zip(loops, losses, strict=False)}
    pairs = zip(listed, losses[len(loops) :], strict=True)
    return [{**change, **outcome, "alone": alone[change["loop"]]} for change, outcome in pairs]


def keep_teacher(folder: Path) -> Advised:
    """A plan that keeps the teacher unsharded, so that its moving average is never gathered."""
    plan = Plan.from_dict(open_run(folder / "teacher").source.manifest.plan)
    names = [name for name in plan.unit_names if name.startswith("teacher")]
    kept = plan.change(names, reshard_after_forward=False)
    return Advised("teacher", HARMFUL, plan=kept.to_toml())


def differs(outcome: Outcome) -> bool:
    """Whether losses differ by more than sums in another order do."""
    return bool(outcome["losses"] != pytest.approx(outcome["alone"], rel=1e-5))


def test_an_offered_change_leaves_the_losses_as_they_are(outcomes: list[Outcome]) -> None:
    offered = [each for each in outcomes if each["setting"] != HARMFUL]
    assert [each for each in offered if "error" in each or differs(each)] == []


def test_losses_show_a_change_that_breaks_a_training(outcomes: list[Outcome]) -> None:
    [harmful] = [each for each in outcomes if each["setting"] == HARMFUL]
    assert differs(harmful)


def test_each_loop_learns_and_has_changes(outcomes: list[Outcome]) -> None:
    assert {each["loop"] for each in outcomes} >= set(QUICK)
    for each in outcomes:
        assert min(each["alone"][-2:]) < 0.99 * each["alone"][0]


@pytest.mark.parametrize("outcomes", [(LOOPS, 1)], indirect=True, ids=["all"])
@pytest.mark.slow
def test_every_setting_of_the_search_was_tried(outcomes: list[Outcome]) -> None:
    tried = {each["setting"] for each in outcomes}
    # R16 is offered only if the waits for reductions cost enough, which depends on the machine.
    assert tried >= VALUES.keys() - {"prefetch_moment"} | {"grouping", "R29", "R36"}
