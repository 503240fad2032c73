from fsdp_inspect.analysis.memory.overview import measure_memory_overview
from fsdp_inspect.formatting import format_category
from fsdp_inspect.report.memory_wording import render_memory
from fsdp_inspect.trace.codes import MemoryCategory, MemoryPoint, Phase
from fsdp_inspect.trace.run import FailedRequest
from tests.builders import MIB, RunBuilder, steady_run
from tests.report import terminal_text as rendering

GIB = 1 << 30


def shown(run, **options):
    return " ".join(
        rendering.text_of(render_memory(measure_memory_overview(run, **options))).split()
    )


def tracked_run():
    builder = RunBuilder(memory_steps=[1])
    rank = builder.rank(0)
    rank.step(1, 0, 100, is_memory_step=True)
    rank.memory(MemoryPoint.STEP_END, 40 * MIB)
    rank.memory(
        MemoryPoint.PEAK, 100 * MIB, unit="layers.1", phase=Phase.BACKWARD,
        activation=70 * MIB, unsharded_parameter=30 * MIB,
    )  # fmt: skip
    rank.memory(MemoryPoint.PEAK_BY_OWNER, 60 * MIB, unit="layers.0", activation=60 * MIB)
    return builder.build()


def cuda_run(*, leak=0, ranks=2):
    builder = RunBuilder(world_size=ranks, device_type="cuda", backend="nccl")
    for number in range(ranks):
        rank = builder.rank(number)
        rank.record.update(memory_from="cuda_allocator", device_memory_bytes=80 * GIB)
        for step in range(10):
            rank.step(step, step * 100, step * 100 + 100)
            ends = 20 * GIB + step * leak + number * GIB
            rank.memory(
                MemoryPoint.BACKWARD_START, ends + 10 * GIB, unit="layers.1", phase=Phase.BACKWARD,
                active=ends + 10 * GIB, reserved=40 * GIB, peak_reserved=40 * GIB,
                num_alloc_retries=step, num_ooms=0, inactive_split=2 * GIB,
            )  # fmt: skip
            rank.memory(MemoryPoint.STEP_END, ends, active=ends, reserved=40 * GIB)
    return builder.build()


def test_the_answer_comes_first_with_its_number():
    assert shown(tracked_run()).startswith(
        "Peak allocated: 100 MiB, in backward of layers.1, step 1. Largest categories: activation "
        "70.0 MiB, unsharded parameter 30.0 MiB. Largest unit: layers.0, 60.0 MiB."
    )


def test_a_peak_without_composition_names_the_highest_reading_and_what_to_do():
    text = shown(cuda_run())
    assert text.startswith(
        "Peak allocated: 31.0 GiB on rank 1. Highest reading: 31.0 GiB, in backward of layers.1, "
        "step 0."
    )
    assert "they require a memory step" in text
    assert "Peak reserved: 40.0 GiB, 50% of 80.0 GiB. Headroom: 40.0 GiB." in text


def test_growth_is_told_with_what_it_leads_to():
    text = shown(cuda_run(leak=GIB, ranks=1))
    assert "Memory grows by 1.00 GiB per step over 10 steps of rank 0" in text
    assert "The device is full after at most 41 more steps." in text
    assert "Memory does not grow over 10 steps of rank 0." in shown(cuda_run(ranks=1))


def test_the_allocator_is_shown_against_the_device():
    text = shown(cuda_run())
    assert "fragmentation 22.5%" in text
    assert "allocation retries 9" in text
    assert "outside the allocator –" in text


def test_ranks_are_compared():
    assert "Peaks of 2 ranks: 30.0 GiB (rank 0) to 31.0 GiB (rank 1), median 30.5 GiB." in shown(
        cuda_run()
    )


def test_a_failed_request_is_said_before_everything_else():
    run = tracked_run()
    failed = FailedRequest(
        requested_bytes=2 * GIB, device_free_bytes=GIB, unit=1, phase="forward", step=1
    )
    run.ranks[0] = run.ranks[0].model_copy(update={"failed_request": failed})
    assert shown(run).startswith(
        "Out of memory: allocating 2.00 GiB failed in forward of layers.1. Step 1. Free on the "
        "device: 1.00 GiB."
    )


def test_a_run_without_memory_says_how_to_record_it():
    text = shown(steady_run())
    assert text.startswith("Memory was not recorded.")
    assert "memory_steps=[3]" in text


def test_an_imported_trace_without_memory_says_what_has_it():
    text = shown(steady_run(source="imported"))
    assert text.startswith("Memory is missing in this import")
    assert "_dump_snapshot" in text


def test_names_from_the_run_are_never_markup():
    builder = RunBuilder(units=("[red]a",))
    rank = builder.rank(0)
    rank.step(0, 0, 10)
    rank.memory(MemoryPoint.FORWARD_END, 5, unit="[red]a", phase=Phase.FORWARD)
    assert "[red]a" in shown(builder.build())


def test_memory_of_whole_parameters_has_no_words_of_shards() -> None:
    builder = RunBuilder(["bucket 0"], world_size=2)
    builder.unit("bucket 0", shard_group=-1, replicate_group=0)
    name = builder.build().manifest.name_category
    named = {each.label: format_category(name(each.label)) for each in MemoryCategory}
    assert (named["sharded_parameter"], named["sharded_gradient"]) == ("parameter", "gradient")
    assert named["reduce_scatter_buffer"] == "bucket"
    assert name("sharded_parameter") == "sharded_parameter"  # in files and comparisons
    sharded = steady_run().manifest.name_category("sharded_parameter")
    assert format_category(sharded) == "sharded parameter"


def test_a_whole_copy_of_no_unit_is_not_called_sharded() -> None:
    manifest = steady_run().manifest
    more = manifest.model.num_parameters + 1
    outside = manifest.model_copy(
        update={"model": manifest.model.model_copy(update={"num_parameters": more})}
    )
    assert format_category(outside.name_category("sharded_parameter")) == "parameter"
    assert format_category(outside.name_category("sharded_gradient")) == "sharded gradient"
