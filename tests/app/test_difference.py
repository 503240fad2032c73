"""The difference of two steps is the time of each unit on the compute stream, by pass."""

from itertools import pairwise

import pytest
from fsdp_inspect_app.timeline.difference import compare_units
from fsdp_inspect_app.timeline.track_set import TrackSet
from fsdp_inspect_app.timeline.tracks import build_timeline

from tests.app.synthetic import UNIT_FQNS, make_manifest, make_run


def step_of(run, step=3, ranks=(0,)):
    return TrackSet(build_timeline(run, step=step, ranks=ranks), run.manifest)


@pytest.fixture(scope="module")
def own():
    return step_of(make_run(num_ranks=2), ranks=(1, 0))


def test_a_step_does_not_differ_from_itself(own):
    difference = compare_units(own, 1, own)
    assert difference.block == 0
    assert {change.phase for change in difference.changes} == {"forward", "backward"}
    assert all(change.delta_ns == 0 and change.own_ns > 0 for change in difference.changes)
    assert (difference.only_here, difference.only_there) == ((), ())
    assert difference.has_same_order


def test_units_of_one_run_only_are_named(own):
    run = make_run()
    renamed = make_manifest(fqns=[*UNIT_FQNS[:2], "blocks.9", *UNIT_FQNS[3:]])
    difference = compare_units(own, 0, TrackSet(step_of(run).timeline, renamed))
    assert difference.block == 1
    assert difference.only_there == ("blocks.9",)
    assert len(difference.only_here) == 1
    assert "blocks.9" not in {change.name for change in difference.changes}


def test_the_strips_of_units_do_not_overlap(own):
    changes = sorted(compare_units(own, 0, own).changes, key=lambda change: change.start_ns)
    for one, following in pairwise(changes):
        assert one.end_ns <= following.start_ns
    assert compare_units(own, 5, own) is None
