"""Mistakes that leave a training running are named, and legal loops that look alike are not."""

from pathlib import Path

import pytest

from fsdp_inspect import index_runs, open_catalog, open_run
from fsdp_inspect.analysis.run_list import list_recorded_runs
from fsdp_inspect.diagnosis.diagnose import ProblemClass, Status
from fsdp_inspect.report.diagnosis import describe_diagnosis
from tests.cases import chosen_cases, mark_slow
from tests.conftest import Torchrun
from tests.distributed.correctness_script import LOOPS, NUM_STEPS

SCRIPT = Path(__file__).with_name("correctness_script.py")
STALE = "The optimizer updates no parameter of the model."
SAME = "Ranks 0-1 read the same batches."
WEIGHTS = "Tokens on rank 1 weigh up to 10.0 times as much."
ALONE = "The ranks do not combine their gradients: each trains alone."
CLIPS = "Each rank clips its gradients by a norm of its own."
REPEATS = "Gradients are never cleared: each update repeats all earlier ones."
CLEARED = "Gradients are cleared between the microbatches of a step."
SUM = "The loss is not divided by the 2 microbatches."
ZEROS = "All sampled gradients are 0 before each update."
MISTAKES = {
    "old-teacher": "1 unit computes with parameters from before their change.",
    "first-of-two-reduced": "The ranks combine only a part of their gradients.",
    "unfrozen-after-ddp": ("DDP does not reduce gradients of parameters that were unfrozen later."),
    "head-replaced": "Gradients of parameters outside all units are not reduced.",
    "zeroed-before-update": ZEROS,
    "clipped-to-zero": ZEROS,
    "probed-before-update": "1 unit computes with parameters from before their change.",
    "old-parameters": "2 units compute with parameters from before their change.",
    "local-norm-logged": "train/grad_norm is the norm of each rank's own gradients.",
    "weights-not-resumed": "The resumed training starts from its first values again.",
    "part-not-resumed": "A part of the resumed model keeps its first values.",
    "schedule-not-resumed": "The resumed training starts its learning rate schedule again.",
    "optimizer-not-resumed": "The resumed optimizer starts without its state.",
    "bias-left-out": "No optimizer holds 1 parameter that has gradients.",
    "layer-added-later": "No optimizer holds 2 parameters that have gradients.",
    "evaluation-left-on": "The model trains in evaluation mode since step 6.",
    "cleared-at-first": "Gradients are no longer cleared.",
    "cleared-later": "Gradients are not cleared in the first updates.",
    "steps-before-backward": "No new gradient reaches the optimizer any more.",
    "model-made-anew": "No new gradient reaches the optimizer any more.",
    "rate-ends-early": "The learning rate is 0 while the training goes on.",
    "rates-of-own-losses": "The learning rate differs between the ranks.",
    "same-batches-later": SAME,
    "detached": "1 unit gets no gradient.",
    "two-optimizers": "Parameters are updated twice with the same gradients.",
    "new-optimizer-for-each-batch": (
        "Most updates begin with a new optimizer, which has no state."
    ),
    "never-cleared": REPEATS,
    "never-cleared-of-ddp": REPEATS,
    "cleared-between": CLEARED,
    "cleared-between-of-ddp": CLEARED,
    "not-divided": SUM,
    "not-divided-without-sync": SUM,
    "scheduled-too-often": "The learning rate changes in every microbatch, not in every update.",
    "stale-optimizer": STALE,
    "stale-optimizer-of-fsdp1": STALE,
    "optimizer-of-the-frozen-part": STALE,
    "stale-optimizers-of-a-container": STALE,
    "same-batches": SAME,
    "same-batches-of-ddp": SAME,
    "token-means": WEIGHTS,
    "token-sums-of-each-rank": WEIGHTS,
    "token-means-halved": WEIGHTS,
    "not-finite-first": WEIGHTS,
    "root-not-sharded": "Gradients of parameters outside all units are not reduced.",
    "no-sync-left-on": ALONE,
    "sync-left-off": "No backward reduces gradients: the optimizer updates nothing.",
    "wrapper-bypassed": ALONE,
    "mesh-of-one-rank": ALONE,
    "replicas-of-other-seeds": "Replicas of the model start from different values.",
    "shards-reduced-again": "Gradient shards are reduced twice: all ranks hold equal ones.",
    "clipped-by-local-norms": CLIPS,
    "clipped-by-local-norms-of-fsdp1": CLIPS,
    "updates-left-out": "Rank 1 left out updates that rank 0 made.",
    "labels-ignored-on-a-rank": "Rank 1 has no label: all of them are ignored.",
    "weighted-by-zero": "The loss has the weight 0: sampled gradients are 0.",
    "divided-twice": "The loss is divided by the 4 microbatches twice.",
    "rounded-away": "100% of the updates change no stored parameter.",
}
NOTES = {
    "evaluation-only": "The model trains in evaluation mode.",
    "cut-later": "1 unit gets no gradient any more.",
    "second-model-detached": "One of the optimizers changes none of its tensors.",
    "new-head": "No optimizer holds 3 parameters that have gradients.",
    "larger-teacher-with-gradients": "No optimizer holds 4 parameters that have gradients.",
}
CERTAIN = ("stale-optimizer", "stale-optimizer-of-fsdp1", "replicas-of-other-seeds")
CERTAIN += (
    "stale-optimizers-of-a-container",
    "optimizer-of-the-frozen-part",
    "updates-left-out",
)
CERTAIN += ("old-teacher", "old-parameters", "probed-before-update")
CERTAIN += ("never-cleared", "never-cleared-of-ddp", "shards-reduced-again", "sync-left-off")

LEGAL = [name for name in LOOPS if name not in MISTAKES and "not-finite-" not in name + "-"]
QUICK = (
    *("probed-before-update", "zeroed-before-update", "head-replaced", "first-of-two-reduced"),
    *("local-norm-logged", "weights-not-resumed", "bias-left-out", "never-cleared"),
    *("cleared-between", "not-divided", "scheduled-too-often", "stale-optimizer", "same-batches"),
    *("token-means", "root-not-sharded", "no-sync-left-on", "replicas-of-other-seeds"),
    *("updates-left-out", "labels-ignored-on-a-rank", "divided-twice"),
    *("clipped-by-local-norms", "rounded-away", "old-teacher", "evaluation-left-on"),
    *("cleared-at-first", "steps-before-backward", "rate-ends-early", "same-batches-later"),
)
"""A mistake for each check."""
READ = {
    *("plain", "norm-of-the-model-logged", "one-batch", "two-losses", "looked-at-often"),
    *("evaluation-only", "cut-later", "sparse-gradients-of-ddp", "sparse-gradients-beside-units"),
    *("parameters-of-64-bits", "jagged-inputs", "gradients-of-samples"),
    *("broken-check", "not-finite", "not-finite-at-the-end", "stale-optimizer"),
    *("stale-optimizer-of-fsdp1", "stale-optimizers-of-a-container"),
    "optimizer-of-the-frozen-part",
}
"""The loops that other tests read."""

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, run_ranks: Torchrun
) -> tuple[Path, str]:
    """A folder with a run of each loop that is read, and what the ranks printed on stderr."""
    folder = tmp_path_factory.mktemp("correctness")
    is_chosen = chosen_cases(request, "name")
    names = [name for name in LOOPS if name in READ or is_chosen(name)]
    ended = run_ranks(SCRIPT, folder, *names)
    return folder, ended.stderr


@pytest.mark.parametrize("name", mark_slow(MISTAKES, but=QUICK))
def test_a_mistake_is_named_before_the_speed(runs: tuple[Path, str], name: str) -> None:
    run = open_run(runs[0] / name)

    [fault] = run.correctness().faults
    verdict, found = run.summary().verdict, run.diagnose()

    assert fault.sentence == MISTAKES[name]
    assert len(fault.headline.split()) <= 12
    assert verdict.sentence == fault.headline
    assert verdict.next_steps[0] == fault.change
    assert (found.problem, found.ranks) == (ProblemClass.TRAINING, fault.ranks)
    assert found.is_certain is fault.is_certain is (name in CERTAIN)
    assert ("correctness_script.py:" in describe_diagnosis(found).sentence) is bool(fault.place)


@pytest.mark.parametrize("name", mark_slow(LEGAL, but={*LEGAL[::8], *READ} & {*LEGAL}))
def test_a_legal_loop_that_looks_alike_is_no_mistake(runs: tuple[Path, str], name: str) -> None:
    run = open_run(runs[0] / name)

    assert run.correctness().faults == ()
    assert run.diagnose().status is Status.HEALTHY


def test_lists_of_runs_name_a_mistake(runs: tuple[Path, str], tmp_path: Path) -> None:
    for name in ("stale-optimizer", "plain"):
        (tmp_path / name).symlink_to(runs[0] / name)
    listed = {each.id: each.notes for each in list_recorded_runs(tmp_path)}
    index_runs(tmp_path)
    rows = open_catalog(tmp_path).query("SELECT run, training FROM runs").rows()
    assert listed == {"stale-optimizer": (STALE,), "plain": ()}
    named = {row["run"]: row["training"] for row in rows}
    assert named == {"plain": None, "stale-optimizer": STALE}


def test_a_model_that_never_trains_with_dropout_is_noted(runs: tuple[Path, str]) -> None:
    [note] = open_run(runs[0] / "evaluation-only").correctness().notes

    assert note.sentence == NOTES["evaluation-only"]
    assert "1 dropout with rates up to 0.1 is off" in note.why


def test_a_unit_that_gets_no_gradient_later_is_noted(runs: tuple[Path, str]) -> None:
    [note] = open_run(runs[0] / "cut-later").correctness().notes

    assert note.sentence == NOTES["cut-later"]
    assert "0 runs with gradients enabled" in note.why
    assert "had no gradient in 12 updates that were looked at from step 14 on" in note.why


@pytest.mark.parametrize("name", ["parameters-of-64-bits", "jagged-inputs", "gradients-of-samples"])
def test_other_tensors_end_no_check(runs: tuple[Path, str], name: str) -> None:
    run = open_run(runs[0] / name)

    assert run.notes == []
    assert run.summary().num_steps == NUM_STEPS
    seen = [rank.training.values for rank in run.source.ranks]
    assert [each.finite_step for each in seen] == [NUM_STEPS] * 2


@pytest.mark.parametrize("name", ["sparse-gradients-of-ddp", "sparse-gradients-beside-units"])
def test_sparse_gradients_end_no_recording(runs: tuple[Path, str], name: str) -> None:
    run = open_run(runs[0] / name)

    assert run.summary().num_steps == NUM_STEPS
    notes = [note for note in run.notes if "report:" in note]
    if name == "sparse-gradients-of-ddp":
        assert "does not tell the buckets of sparse gradients" in notes.pop()
        assert "its units are not recorded" in notes.pop()
    else:
        assert [unit.lost_ratio for unit in run.numerics().units] == [0.0] * 3
    assert notes == []


def test_the_line_of_the_script_s_own_collectives_is_named(runs: tuple[Path, str]) -> None:
    run = open_run(runs[0] / "norm-of-the-model-logged")

    exposed = run.summary().exposed
    assert exposed is not None
    source = SCRIPT.read_text().splitlines()
    for part in exposed.not_fsdp:
        file, _, line = part.place.rpartition(":")
        assert Path(file).name == SCRIPT.name
        assert "full_tensor()" in source[int(line) - 1]
        assert part.count_per_step > 0
    assert exposed.not_fsdp


def test_parameters_that_are_not_finite_are_found_without_numerics_every(
    runs: tuple[Path, str],
) -> None:
    run, at_end = open_run(runs[0] / "not-finite"), open_run(runs[0] / "not-finite-at-the-end")

    [fault], [last] = run.correctness().faults, at_end.correctness().faults

    assert run.summary().verdict.sentence == fault.sentence == "Parameters are not finite."
    assert fault.why == (
        "Parameters or optimizer states stopped being finite in or before step 4. "
        "They were finite before step 1. The first loss that is not finite is that of step 3."
    )
    assert fault.place.rpartition("/")[2].startswith("correctness_script.py:")
    found = run.diagnose()
    assert found.problem is ProblemClass.NOT_FINITE
    assert describe_diagnosis(found).sentence.endswith(
        "The first loss that is not finite is that of step 3."
    )
    assert last.why == (
        "After step 5, trained parameters of bucket 0 are not finite on ranks 0-1. "
        "They were finite before step 1."
    )
    assert fault.is_certain
    assert last.is_certain
    assert at_end.diagnose().training == last


def test_steps_that_look_at_the_parameters_are_not_timed(runs: tuple[Path, str]) -> None:
    run = open_run(runs[0] / "looked-at-often")

    for record in run.source.ranks:
        assert record.training is not None
        seen = record.training.values
        assert (seen.loss_step, seen.finite_step, seen.step) == (2, 5, None)
    assert "4 (slowed by the recorder)" in run.summary().left_out.sentence


def test_an_error_of_a_check_ends_the_checks_only(runs: tuple[Path, str]) -> None:
    run = open_run(runs[0] / "broken-check")

    assert run.summary().num_steps == 6
    assert "gradients" in run.correctness().not_checked
    for record in run.source.ranks:
        [problem] = record.problems
        assert problem.startswith("The training is not checked: an internal error at ")
        assert "ZeroDivisionError(" in problem


def test_what_was_not_observed_is_not_checked(runs: tuple[Path, str]) -> None:
    unknown = {name: open_run(runs[0] / name).correctness().not_checked for name in READ}

    assert list(unknown["plain"]) == ["logged"]
    assert unknown["norm-of-the-model-logged"] == {}
    assert list(unknown["one-batch"]) == ["logged", "batches"]
    assert list(unknown["two-losses"]) == ["logged", "loss"]


def test_a_stale_optimizer_is_printed_at_its_first_update(runs: tuple[Path, str]) -> None:
    printed = runs[1].count("rank 0: The optimizer updates no parameter of the model (")
    assert printed == 4  # once for each of the loops
    frozen = open_run(runs[0] / "optimizer-of-the-frozen-part").correctness().faults[0]
    assert frozen.why.endswith(" 2 of them are its frozen parameters.")
