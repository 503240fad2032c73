"""Annotations of torch show step, phase and unit; versions and users may have others."""

import numpy as np
import pytest

from fsdp_inspect.importing.snapshot_contents import Annotation
from fsdp_inspect.importing.snapshot_positions import FsdpActivity, follow_annotations
from fsdp_inspect.trace.codes import Phase


def positions_of(*events):
    """Positions after these events, one microsecond apart: `+name` starts, `-name` ends."""
    walk = [Annotation(time, one[1:], one[0] == "+") for time, one in enumerate(events)]
    return follow_annotations(walk)


def last(*events):
    """Phase, unit and activity after the last event."""
    positions = positions_of(*events)
    unit = int(positions.unit[-1])
    name = positions.units[unit] if unit >= 0 else None
    return Phase(positions.phase[-1]), name, FsdpActivity(positions.activity[-1])


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("FSDP::all_gather (layers.0)", "layers.0"),
        ("FSDP::all_gather", ""),
        ("FSDP::all_gather (norm, lm_head)", "norm, lm_head"),
        ("FSDP::all_gather (layers.0) [pg=3]", "layers.0"),
    ],
)
def test_a_range_names_its_unit(name, unit):
    assert last(f"+{name}")[1:] == (unit, FsdpActivity.ALL_GATHER)


def test_the_roots_empty_parentheses_are_the_root():
    assert last("+FSDP::post_backward_rs_wait ()")[1] == ""


def test_a_unit_computes_from_the_end_of_its_pre_forward_to_its_post_forward():
    begin = ("+FSDP::pre_forward (a)", "-FSDP::pre_forward (a)")
    assert last(*begin) == (Phase.FORWARD, "a", FsdpActivity.COMPUTE)
    end = ("+FSDP::post_forward (a)", "-FSDP::post_forward (a)")
    assert last(*begin, *end) == (Phase.FORWARD, None, FsdpActivity.NONE)


def test_inside_a_prefetch_the_gathered_unit_owns_what_is_allocated():
    begin = ("+FSDP::pre_forward (a)", "-FSDP::pre_forward (a)")
    prefetch = ("+FSDP::forward_prefetch for b", "+FSDP::all_gather (b)")
    assert last(*begin, *prefetch) == (Phase.FORWARD, "b", FsdpActivity.ALL_GATHER)


def test_units_that_are_nested_give_way_to_the_outer_one_when_they_are_done():
    outer = ("+FSDP::pre_forward", "-FSDP::pre_forward")
    inner = [f"{sign}FSDP::{kind} (a)" for kind in ("pre_forward", "post_forward") for sign in "+-"]
    assert last(*outer, *inner)[1] == ""


def test_a_backward_lasts_until_its_final_callback():
    begin = ("+FSDP::pre_backward (a)", "-FSDP::pre_backward (a)")
    assert last(*begin)[0] is Phase.BACKWARD
    reduced = ("+FSDP::post_backward_reshard (a)", "-FSDP::post_backward_reshard (a)")
    assert last(*begin, *reduced)[:2] == (Phase.BACKWARD, None)
    callback = ("+FSDP::root_post_backward_callback", "-FSDP::root_post_backward_callback")
    assert last(*begin, *callback)[0] is Phase.OUTSIDE


def test_steps_end_with_the_optimizer():
    step = ("+Optimizer.step#AdamW.step", "-Optimizer.step#AdamW.step")
    positions = positions_of(*step, *step)
    assert positions.step.tolist() == [0, 0, 1, 1, 2]
    assert positions.step_ends_us == (1, 3)


def test_the_profilers_steps_win_over_the_optimizers():
    one = ("+ProfilerStep#7", "+Optimizer.step#SGD.step", "-Optimizer.step#SGD.step")
    positions = positions_of(*one, "-ProfilerStep#7")
    assert positions.step_ends_us == (3,)


def test_loading_data_is_a_phase():
    assert last("+enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__")[0] is Phase.DATA


def test_other_annotations_change_nothing():
    positions = positions_of("+## forward ##", "-## forward ##", "+FSDP::", "+nonsense")
    assert (positions.units, len(positions.time_us)) == ((), 2)


def test_a_moment_belongs_to_the_last_annotation_before_it():
    positions = positions_of("+FSDP::all_gather (a)", "-FSDP::all_gather (a)")
    assert positions.at(np.array([-1, 0, 1, 500])).tolist() == [0, 1, 2, 2]


def test_ranges_that_never_end_cost_no_more_than_others():
    begun = [f"+FSDP::all_gather (u{number})" for number in range(20_000)]
    ended = [f"-FSDP::all_gather (u{number})" for number in range(20_000)]
    assert len(positions_of(*begun, *ended).units) == 20_000
