from fsdp_inspect.analysis.provenance import measure_provenance
from fsdp_inspect.trace.codes import EventKind, Method, Phase, Source
from tests.builders import RunBuilder, steady_run

BLOCKING = int(Method.HOST_BLOCKING)


def one_step():
    builder = RunBuilder(world_size=1)
    builder.rank(0).step(0, 0, 100)
    return builder, builder.rank(0)


def test_every_group_of_numbers_says_how_it_was_obtained():
    provenance = measure_provenance(steady_run())
    assert provenance.sources == ("recorded",)
    assert provenance.methods["all_gather"] == "measured"
    assert provenance.methods["optimizer"] == "measured"


def test_a_group_obtained_in_two_ways_names_both():
    builder, rank = one_step()
    rank.all_reduce("layers.0", 0, 10)
    rank.all_reduce("layers.0", 10, 20, method=int(Method.INFERRED))
    assert measure_provenance(builder.build()).methods["all_reduce"] == "measured, inferred"


def test_groups_without_events_are_absent():
    builder, _ = one_step()
    assert measure_provenance(builder.build()).methods == {"step": "measured"}


def test_in_a_kernel_trace_kernels_are_measured_and_their_phase_is_inferred():
    builder, rank = one_step()
    rank.add(EventKind.COMPUTE, 0, 50, phase=Phase.FORWARD)
    rank.add(EventKind.COMPUTE, 50, 60)
    methods = measure_provenance(builder.build()).methods
    assert methods == {"step": "measured", "forward": "inferred", "compute": "measured"}


def test_a_backend_blocks_the_host_when_every_collective_did():
    builder, rank = one_step()
    rank.all_gather("layers.0", 0, 10, method=BLOCKING)
    assert measure_provenance(builder.build()).blocks_host
    rank.reduce_scatter("layers.0", 20, 30)
    assert not measure_provenance(builder.build()).blocks_host


def test_no_communication_blocks_nobody():
    builder, _ = one_step()
    assert not measure_provenance(builder.build()).blocks_host


def test_emulated_events_say_so():
    builder, rank = one_step()
    rank.all_gather("layers.0", 0, 10, source=int(Source.EMULATED))
    assert measure_provenance(builder.build()).sources == ("recorded", "emulated")


def test_without_a_timed_step_the_manifest_names_the_source():
    provenance = measure_provenance(RunBuilder(source="emulated").build())
    assert (provenance.sources, provenance.methods) == (("emulated",), {})
