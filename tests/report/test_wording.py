from dataclasses import replace
from types import SimpleNamespace

import pytest

from fsdp_inspect.analysis.breakdown import measure_breakdown
from fsdp_inspect.analysis.plan_check.check import LoopFacts
from fsdp_inspect.analysis.run_heading import measure_run_heading
from fsdp_inspect.analysis.stragglers.ranks import measure_ranks
from fsdp_inspect.analysis.summary import measure_summary
from fsdp_inspect.formatting import MISSING, format_ns
from fsdp_inspect.metrics import find_metric
from fsdp_inspect.report.ranks_wording import describe_rank
from fsdp_inspect.report.wording import (
    define_terms,
    define_words,
    describe_cut,
    describe_main_cause,
    describe_run,
    describe_step,
    format_change,
    format_error,
    name_backend,
)
from fsdp_inspect.trace.run import ProcessGroup
from tests.builders import run_on, steady_run


@pytest.mark.parametrize(
    ("ratio", "change", "error"),
    [
        (None, MISSING, MISSING),
        (0, "=", "0%"),
        (-0.00001, "0.0%", "0.0%"),
        (0.00001, "0.0%", "0.0%"),
        (-0.227, "-22.7%", "-22.7%"),
        (0.1, "+10%", "+10%"),
    ],
)
def test_changes_and_errors_have_a_sign_and_nothing_has_none(ratio, change, error):
    assert (format_change(ratio), format_error(ratio)) == (change, error)


@pytest.mark.parametrize(
    ("backend", "name"), [("nccl", "nccl"), ("fake", "emulated"), ("", ""), (None, "")]
)
def test_torchs_fake_backend_is_called_emulated(backend, name):
    assert name_backend(backend) == name


@pytest.mark.parametrize(
    ("causes", "said", "in_headline"),
    [
        ({}, "", ""),
        ({"late_issue": 9, "floor": 1}, "mostly late issue", "mostly late issue"),
        ({"floor": 9, "straggler": 1}, "mostly floor, then waiting for the last rank", ""),
        ({"floor": 9}, "mostly floor", ""),
        ({"floor": 4, "bandwidth": 3, "straggler": 3}, "floor and transfer", ""),
    ],
)
def test_the_main_cause_names_what_the_floor_hides(causes, said, in_headline):
    waits = [SimpleNamespace(causes_ns={name: ns}) for name, ns in causes.items()]
    assert describe_main_cause(waits) == said
    assert describe_main_cause(waits, is_headline=True) == in_headline


def test_words_for_waits_are_defined_as_in_the_table_of_metrics():
    defined = define_words("(no unit) all-reduce: mostly floor, then late issue")
    assert f"Floor: {find_metric('floor_ns').definition}." in defined
    assert f"Late issue: {find_metric('late_issue_ns').definition}." in defined
    assert "(no unit): a collective that no unit or bucket owns" in defined
    assert "Blocking" not in defined
    assert define_words("The step is input-bound.") == ""


def test_exposed_communication_that_an_import_does_not_show_is_called_unknown():
    run = run_on(["a", "b"], source="imported")
    step = describe_step(measure_breakdown(run).headline)
    assert step == "Step 0, rank 0: 1 ns. Exposed communication is unknown."
    rank = describe_rank(measure_ranks(run).ranks[0])
    assert rank == "Rank 0 (a): 1 ns a step. Its exposed communication and own work are unknown."


def test_a_list_that_is_cut_states_the_part_that_it_shows():
    assert describe_cut([3e6, 2e6], 2, format_ns) == ""
    words = describe_cut([3e6, 2e6, 1e6], 2, format_ns)
    assert words == "The largest 2 of 3: 5.00 ms of 6.00 ms. The table has all."


def test_our_words_are_defined_unless_the_text_does_so():
    own_work = find_metric("own_work_ns").definition
    assert define_terms("Own work by rank, FSDP copies 2.00 ms").startswith("FSDP copies: copies")
    assert define_terms("Own work by rank") == f"Own work: {own_work}."
    assert define_terms(f"Own work: {own_work}.") == ""
    assert define_terms("Compute") == ""


def test_the_set_up_of_a_run_has_the_backwards_of_its_steps():
    summary = measure_summary(steady_run())
    loop = LoopFacts(microbatches=4, sync="last", kept_between_microbatches=())
    for loop_facts, words in (
        (loop, " · 4 microbatches a step"),
        (replace(loop, adds_up=False), " · 4 backwards a step"),
        (replace(loop, microbatches=1), "200 parameters"),
    ):
        checked = replace(summary.plan_check, loop=loop_facts)
        assert describe_run(replace(summary, plan_check=checked)).endswith(words)
    assert "2 ranks (1 recorded)" in describe_run(replace(summary, num_ranks=1))


@pytest.mark.parametrize(
    ("mesh", "dimension", "ranks", "is_stage"),
    [
        ({"fsdp": 2}, "pp", [0, 2], True),
        ({"fsdp": 2}, "pp", [0], False),
        ({"fsdp": 2}, "tp", [0, 2], False),
        ({"pipeline": 2, "fsdp": 2}, "tp", [0, 2], True),
    ],
)
def test_the_parameters_of_a_pipeline_are_those_of_one_stage(mesh, dimension, ranks, is_stage):
    run = steady_run()
    group = ProcessGroup(index=0, name="1", ranks=ranks, role="other", dimension=dimension)
    fields = {"mesh": mesh, "process_groups": [group], "world_size": 4}
    staged = replace(run, manifest=run.manifest.model_copy(update=fields))
    said = describe_run(measure_run_heading(staged))
    assert ("200 parameters on one pipeline rank" in said) is is_stage
