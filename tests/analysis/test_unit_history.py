import pytest

from fsdp_inspect.analysis.unit_history import measure_unit_history
from fsdp_inspect.errors import IncompleteRunError
from fsdp_inspect.trace.codes import EventKind, Phase
from tests.builders import RunBuilder, steady_run

KEPT, RESHARDED = 0, 1


def two_units():
    """One step: unit 0 is gathered once and kept, unit 1 in forward and in backward."""
    builder = RunBuilder(("layers.0", "layers.1"), world_size=2)
    rank = builder.rank(0)
    rank.step(0, 1000, 2000)
    rank.all_gather("layers.0", 1010, 1030, need=1010)
    rank.copy_out("layers.0", 1030, 1035)
    rank.forward("layers.0", 1035, 1100)
    rank.all_gather("layers.1", 1040, 1060, need=1100)
    rank.copy_out("layers.1", 1100, 1105)
    rank.forward("layers.1", 1105, 1200)
    rank.all_gather("layers.1", 1200, 1220, need=1200, phase=Phase.BACKWARD)
    rank.copy_out("layers.1", 1220, 1225)
    rank.backward("layers.1", 1225, 1400)
    rank.add(EventKind.REDUCE_SCATTER_COPY_IN, 1400, 1405, unit="layers.1", phase=Phase.BACKWARD)
    rank.reduce_scatter("layers.1", 1405, 1430)
    rank.backward("layers.0", 1405, 1600)
    return builder.build()


def held(run, unit):
    holds = measure_unit_history(run, unit=unit).holds
    return {(hold.category, hold.start_ns, hold.end_ns) for hold in holds}


def test_a_unit_that_reshards_holds_its_parameters_once_a_pass():
    assert held(two_units(), RESHARDED) == {
        ("all_gather_buffer", 40, 105),
        ("unsharded_parameter", 100, 200),
        ("all_gather_buffer", 200, 225),
        ("unsharded_parameter", 220, 400),
        ("reduce_scatter_buffer", 400, 430),
    }


def test_a_unit_that_is_kept_holds_its_parameters_from_forward_to_the_end_of_its_backward():
    assert held(two_units(), KEPT) == {
        ("all_gather_buffer", 10, 35),
        ("unsharded_parameter", 30, 600),
    }


def test_collectives_are_listed_by_kind_and_phase_with_their_waits():
    gathers, again, reductions = measure_unit_history(two_units(), unit=RESHARDED).histories
    assert (gathers.kind, gathers.phase) == ("all_gather", "forward")
    assert (again.kind, again.phase) == ("all_gather", "backward")
    assert (reductions.kind, reductions.phase) == ("reduce_scatter", "backward")
    [first], [second] = gathers.collectives, again.collectives
    assert (first.step, first.duration_ns, first.exposed_ns) == (0, 20, 0)
    assert (second.duration_ns, second.exposed_ns) == (20, 20)
    assert first.bus_bytes_per_s == pytest.approx(64 * 0.5 / 20e-9)
    assert gathers.duration_ns.median == 20


def test_the_history_has_every_timed_step():
    history = measure_unit_history(steady_run(world_size=2, num_steps=4), unit=1)
    assert history.num_steps == len(history.histories[0].collectives) == 3
    assert history.step_time_ns == 1000


def test_without_a_timed_step_there_is_no_history():
    builder = RunBuilder(("layers.0",), world_size=2, warmup_steps=1)
    builder.rank(0).step(0, 0, 100)
    assert measure_unit_history(builder.build(), unit=0) is None


def test_a_rank_that_is_not_there_is_refused():
    with pytest.raises(IncompleteRunError, match="Rank 7 not found"):
        measure_unit_history(two_units(), unit=0, rank=7)
