"""Norms, lost updates and the first values that are not finite, from steps written by hand."""

from dataclasses import replace

import pytest

from fsdp_inspect.analysis.numerics import Numerics, measure_numerics
from fsdp_inspect.diagnosis.diagnose import Diagnosis, ProblemClass, diagnose
from fsdp_inspect.report.diagnosis import describe_diagnosis, headline_diagnosis
from fsdp_inspect.report.text import render_numerics
from fsdp_inspect.trace.numerics import NumericsStep, Observation, Place, Update
from tests.builders import InMemoryRun, steady_run
from tests.report.terminal_text import text_of

UNIT = 1


def seen(place: Place, order: int = 0, bad: int = 0, square: float = 9.0) -> Observation:
    value = None if bad else square
    return Observation(UNIT, place, order, 100, bad, value, value, ("bfloat16",))


def step_of(number: int, *observations: Observation, lost: int = 0) -> NumericsStep:
    shown = observations or (seen(Place.PARAMETER), seen(Place.REDUCED_GRADIENT, 1))
    return NumericsStep(number, shown, (Update(UNIT, 100, lost, 4.0),))


def run_of(*ranks: list[NumericsStep]) -> InMemoryRun:
    return replace(steady_run(), numerics_steps=dict(enumerate(ranks)))


def numerics_of(*ranks: list[NumericsStep]) -> Numerics:
    found = measure_numerics(run_of(*ranks))
    assert found is not None
    return found


def shown(found: Numerics) -> str:
    return " ".join(text_of(render_numerics(found), width=200).split())


def diagnose_steps(*ranks: list[NumericsStep]) -> Diagnosis:
    return diagnose(run_of(*ranks))


def test_a_run_without_numerics_steps_has_none() -> None:
    assert measure_numerics(steady_run()) is None


def test_norms_are_those_of_the_whole_unit() -> None:
    (unit,) = numerics_of([step_of(0)], [step_of(0)]).units
    assert unit.gradient_norm == pytest.approx(18**0.5)
    assert unit.update_ratio == pytest.approx((8 / 18) ** 0.5)


def test_a_unit_that_every_rank_holds_whole_counts_once() -> None:
    run = run_of([step_of(0)], [step_of(0)])
    units = [
        unit.model_copy(update={"shard_group": -1, "replicate_group": 0})
        for unit in run.manifest.units
    ]
    replicated = replace(run, manifest=run.manifest.model_copy(update={"units": units}))
    found = measure_numerics(replicated)
    assert found is not None
    assert found.units[0].gradient_norm == pytest.approx(3.0)


def test_norms_are_those_of_the_last_step_that_all_ranks_recorded() -> None:
    later = step_of(8, seen(Place.PARAMETER, square=25.0), seen(Place.REDUCED_GRADIENT, 1))
    found = numerics_of([step_of(0), later], [step_of(0)])
    assert (found.step, found.missing_ranks, found.incomplete_steps) == (0, (), (8,))
    assert found.units[0].parameter_norm == pytest.approx(18**0.5)
    assert "The numerics of step 8 are missing for some ranks" in shown(found)


def test_a_norm_is_unknown_if_a_rank_of_its_group_has_no_numerics() -> None:
    found = numerics_of([step_of(0), step_of(8)])
    (unit,) = found.units
    assert (unit.gradient_norm, unit.parameter_norm, unit.update_ratio) == (None, None, None)
    assert found.missing_ranks == (1,)
    assert "The numerics of step 8 are missing for rank 1." in shown(found)


def test_an_empty_shard_has_no_values_and_leaves_the_norm_known() -> None:
    found = numerics_of([step_of(0)], [NumericsStep(0, (), ())])
    assert found.units[0].gradient_norm == pytest.approx(3.0)
    assert "missing" not in shown(found)


def test_lost_updates_are_the_median_over_the_steps() -> None:
    found = numerics_of([step_of(step, lost=lost) for step, lost in enumerate((100, 20, 30))])
    assert found.lost_ratio == 0.3


def test_a_gradient_that_overflows_alone_is_no_problem() -> None:
    overflow = step_of(4, seen(Place.PARAMETER), seen(Place.REDUCED_GRADIENT, 1, bad=3))

    found = diagnose_steps([step_of(0), overflow], [step_of(0), step_of(4)])

    assert found.problem is None
    assert numerics_of([overflow]).first_non_finite is None


def test_the_first_values_are_those_looked_at_first_in_the_step_that_stored_them() -> None:
    bad = step_of(
        8,
        seen(Place.PARAMETER),
        seen(Place.OUTPUT, 1),
        seen(Place.GRADIENT, 2, bad=7),
        seen(Place.UPDATED_PARAMETER, 3, bad=100),
    )
    later = step_of(8, seen(Place.PARAMETER), seen(Place.UPDATED_PARAMETER, 3, bad=100))

    found = diagnose_steps([step_of(0), step_of(4), later], [step_of(0), step_of(4), bad])

    assert (found.problem, found.ranks, found.step) == (ProblemClass.NOT_FINITE, (1,), 8)
    assert describe_diagnosis(found).sentence == (
        "The first values that are not finite are in step 8 on rank 1: 7 of 100 values of the "
        "gradient of layers.1."
    )
    assert found.is_certain


@pytest.mark.parametrize(
    ("before", "words"),
    [
        ([], "They arose in it or before it: it is the first numerics step."),
        ([step_of(0)], "They arose after step 0, the last numerics step with finite parameters"),
    ],
)
def test_values_that_arose_between_numerics_steps_name_no_unit_and_no_rank(
    before: list[NumericsStep], words: str
) -> None:
    steps = [*before, step_of(11, seen(Place.PARAMETER, bad=100))]

    found = diagnose_steps(steps, steps)

    assert (found.problem, found.ranks, found.unit) == (ProblemClass.NOT_FINITE, (), None)
    assert not found.is_certain
    text = describe_diagnosis(found)
    assert words in text.sentence
    assert headline_diagnosis(found) == "Values are not finite in step 11."
    assert any("--numerics-every 1 " in step for step in text.next)


def test_parameters_that_changed_right_before_the_step_are_located() -> None:
    bad = [step_of(0), step_of(1, seen(Place.PARAMETER, bad=100))]

    found = diagnose_steps([step_of(0), step_of(1)], bad)

    assert (found.ranks, found.is_certain) == ((1,), True)
    assert describe_diagnosis(found).sentence == (
        "The parameters of layers.1 are not finite at the start of step 1 on rank 1: 100 of 100 "
        "values. In step 0, the numerics step before, parameters and optimizer states were finite."
    )


def test_values_that_are_not_finite_on_all_ranks_at_once_blame_no_rank() -> None:
    bad = step_of(
        8, seen(Place.PARAMETER), seen(Place.OUTPUT, 1, bad=9), seen(Place.STATE, 3, bad=9)
    )
    found = diagnose_steps([bad], [bad])
    assert (found.problem, found.is_certain, found.ranks) == (ProblemClass.NOT_FINITE, True, ())
    assert found.unit == "layers.1"
    assert "in step 8 on ranks 0-1" in describe_diagnosis(found).sentence


def test_a_rank_without_the_step_leaves_the_place_open() -> None:
    bad = step_of(8, seen(Place.PARAMETER), seen(Place.UPDATED_PARAMETER, 3, bad=100))
    assert not diagnose_steps([step_of(0), bad], [step_of(0)]).is_certain


def test_a_rank_without_the_step_before_leaves_the_place_open() -> None:
    bad = step_of(1, seen(Place.PARAMETER, bad=100))
    found = diagnose_steps([step_of(0), step_of(1)], [bad])
    assert (found.is_certain, found.ranks) == (False, ())
    assert "ranks lack each earlier numerics step" in describe_diagnosis(found).sentence


def test_most_updates_lost_in_a_low_precision_is_a_problem() -> None:
    found = diagnose_steps([step_of(0, lost=98)], [step_of(0, lost=98)])
    assert found.problem is ProblemClass.PRECISION_LOSS
    assert describe_diagnosis(found).sentence == (
        "98% of the updates changed no stored parameter (median of 1 numerics step): they are "
        "smaller than the rounding of bfloat16."
    )


@pytest.mark.parametrize(("lost", "dtype"), [(49, "bfloat16"), (98, "float32")])
def test_few_lost_updates_or_full_precision_are_none(lost: int, dtype: str) -> None:
    observations = (replace(seen(Place.PARAMETER), dtypes=(dtype,)),)
    assert diagnose_steps([step_of(0, *observations, lost=lost)]).problem is None


def test_a_dtype_that_is_not_the_declared_one_is_listed() -> None:
    assert steady_run().manifest.units[UNIT].param_dtype == "float32"
    stored = replace(seen(Place.PARAMETER), dtypes=("float32",))
    gradient = replace(seen(Place.GRADIENT, 2), dtypes=("float32",))
    output, reduced = seen(Place.OUTPUT, 1), seen(Place.REDUCED_GRADIENT, 3)
    found = numerics_of([step_of(0, stored, output, gradient, reduced)]).other_dtypes
    assert [(each.place, each.declared, each.actual, each.units) for each in found] == [
        ("forward output", "float32", "bfloat16", ("layers.1",)),
        ("reduced gradient", "float32", "bfloat16", ("layers.1",)),
    ]


def test_states_may_be_wider_than_the_parameters_but_not_narrower() -> None:
    def states_in(dtype: str) -> bool:
        stored = replace(seen(Place.PARAMETER), dtypes=("bfloat16",))
        state = replace(seen(Place.STATE, 2), dtypes=(dtype,))
        uses = numerics_of([step_of(0, stored, state)]).dtypes
        return next(each.is_as_declared for each in uses if each.place == "optimizer state")

    assert states_in("float32")
    assert states_in("bfloat16")
    assert not states_in("float8_e4m3fn")
