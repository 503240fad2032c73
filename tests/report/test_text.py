from dataclasses import replace

import pytest

from fsdp_inspect.analysis.summary import measure_summary
from fsdp_inspect.analysis.units import measure_units
from fsdp_inspect.report.text import MOST_RANKS, render_summary, render_units, render_verdict
from fsdp_inspect.trace.codes import MemoryPoint, Phase
from fsdp_inspect.trace.run import RunStatus
from tests.builders import MIB, RunBuilder, add_steady_step, steady_run
from tests.report.terminal_text import text_of

SUMMARY = """\
hand-made  complete
2 ranks · FSDP2 · gloo · cpu · Decoder, 200 parameters

{verdict}

Typical step of rank 0 (mean over 3 timed steps)
part                       time  share
forward                  200 ns    20%  ██████
backward                 320 ns    32%  ██████████
FSDP copies               20 ns     2%  █
exposed all-gather       130 ns    13%  ▒▒▒▒
exposed reduce-scatter   100 ns    10%  ▒▒▒
exposed other             20 ns     2%  ▒
optimizer                100 ns    10%  ███
data                      50 ns     5%  ██
other                     60 ns     6%  ██
= step                  1.00 µs   100%
  Other (60 ns): the rest of the step: loss, clipping, logging, generation,
  batches of no DataLoader. To split it, record with --profile-steps 20:23.

Key numbers of rank 0 (3 timed steps)
step time              1.00 µs  p10 1.00 µs, p90 1.00 µs
communication           500 ns
exposed communication   250 ns
floor                   150 ns
overlap                    50%
peak allocated               –
peak reserved                –  missing on CPU
loss                         1  from 4

Largest waits of rank 0, per step
unit        collective      phase     in flight  exposed   floor
layers.0    reduce-scatter  backward     100 ns   100 ns  100 ns
layers.0    all-gather      forward       50 ns    50 ns   50 ns
layers.1    all-gather      forward      150 ns    50 ns    0 ns
layers.1    all-gather      backward      30 ns    30 ns    0 ns
(not FSDP)  all-reduce      backward      20 ns    20 ns    0 ns

Typical step of each rank
rank  step time  communication  exposed  overlap
   0    1.00 µs         500 ns   250 ns      50%
   1    1.00 µs         500 ns   250 ns      50%

Declared and observed plan
{plan_check}

{provenance}"""

UNITS = """\
Collectives of each unit
unit      collective      n  message  duration  exposed       bus
layers.0  all-gather      2     64 B     60 ns    50 ns  533 MB/s
layers.0  reduce-scatter  1     64 B    100 ns   100 ns  320 MB/s
layers.1  all-gather      2     64 B     90 ns    80 ns  356 MB/s
layers.1  reduce-scatter  1     64 B     80 ns     0 ns  400 MB/s

Compute and copies of each unit
unit      params  forward  backward  recompute  copies  prefetched
layers.0     100   100 ns    160 ns       0 ns   10 ns           1
layers.1     100   100 ns    160 ns       0 ns   10 ns           1

Typical step of rank 0, from 3 timed steps. n: collectives per step, mean over
all timed steps. duration: of one collective on this rank, with its wait for the
last rank; the section `exposed` has the transfers alone. exposed: per typical
step. forward and backward include nested units and the waits for them. bus:
message x (N-1)/N / duration for all-gather and reduce-scatter, 2(N-1)/N for
all-reduce, N ranks in the group (nccl-tests); missing for N = 1."""


def summary_of(run):
    return text_of(render_summary(measure_summary(run)))


def one_rank(**manifest):
    builder = RunBuilder(world_size=1, **manifest)
    add_steady_step(builder.rank(0), 0, start=0)
    return builder


def test_a_summary_fits_eighty_columns_and_reads_so():
    digest = measure_summary(steady_run())
    shown, check = text_of(render_summary(digest)), digest.plan_check.sentence
    assert max(map(len, shown.splitlines())) <= 80
    provenance = (
        f"Recorded run. {digest.left_out.sentence}\nTimes by method. measured: step, all-gather, "
        "reduce-scatter, all-reduce, copies, forward, backward, optimizer, data."
    )
    assert shown == SUMMARY.format(
        verdict=text_of(render_verdict(digest.verdict)),
        plan_check=text_of(check),
        provenance=text_of(provenance),
    )


def test_units_read_so():
    assert text_of(render_units(measure_units(steady_run()))) == UNITS


def test_a_verdict_states_its_reason_and_what_to_try_next():
    verdict = replace(
        measure_summary(steady_run()).verdict,
        sentence="A.",
        largest_part="Compute.",
        why="B.",
        next_steps=("C.", "D."),
    )
    assert text_of(render_verdict(verdict)) == "A.\n  Compute.\n  Why: B.\n  Next: C.\n  Or: D."


def test_a_unit_name_is_never_read_as_markup():
    builder = RunBuilder(units=("[red]layers[/red]", "layers.1"), world_size=1)
    builder.rank(0).step(0, 0, 100)
    builder.rank(0).all_gather("[red]layers[/red]", 0, 50, need=0)
    run = builder.build()
    assert "[red]layers[/red]" in summary_of(run)
    assert "[red]layers[/red]" in text_of(render_units(measure_units(run)))


def test_the_root_is_shown_by_a_name():
    builder = RunBuilder(units=("",), world_size=1)
    builder.rank(0).step(0, 0, 100)
    assert "(root)" in text_of(render_units(measure_units(builder.build())))


def test_missing_ranks_are_counted_in_the_headline():
    builder = RunBuilder(world_size=4)
    builder.rank(0).step(0, 0, 100)
    assert "4 ranks (1 recorded)" in summary_of(builder.build())


def test_a_run_without_steps_says_what_to_do_and_shows_no_zeros():
    shown = summary_of(RunBuilder().build())
    assert "The limit is unknown: the run has no timed step." in shown
    assert "Record more steps" in shown
    assert "0 ns" not in shown


def test_what_fills_memory_is_shown_by_category_and_owner():
    builder = one_rank(memory_steps=[7])
    rank = builder.rank(0)
    rank.step(7, 2000, 3000, is_memory_step=True)
    rank.memory(MemoryPoint.PEAK, 8 * MIB, phase=Phase.BACKWARD, activation=6 * MIB)
    rank.memory(MemoryPoint.PEAK_BY_OWNER, 5 * MIB, unit="layers.1")
    shown = summary_of(builder.build())
    assert "Memory at the peak: 8.00 MiB in backward, memory step 7, rank 0" in shown
    assert "activation       6.00 MiB" in shown
    assert "unattributed     2.00 MiB" in shown
    assert "layers.1     5.00 MiB" in shown
    assert "Memory counted by the storage tracker." in shown


def test_reserved_memory_is_set_against_the_device():
    builder = one_rank(device_type="cuda")
    record = {"memory_from": "cuda_allocator", "device_memory_bytes": 100 * MIB}
    builder.rank(0).record.update(record)
    builder.rank(0).memory(MemoryPoint.STEP_END, 40 * MIB, reserved=50 * MIB)
    shown = summary_of(builder.build())
    assert "peak reserved          50.0 MiB  50% of 100 MiB" in shown


def test_many_ranks_are_cut_and_counted():
    shown = summary_of(steady_run(world_size=MOST_RANKS + 3))
    assert f"the first {MOST_RANKS} of {MOST_RANKS + 3}" in shown
    assert f"\n  {MOST_RANKS - 1} " in shown
    assert f"\n  {MOST_RANKS} " not in shown


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_line_is_wider_than_the_terminal(width):
    shown = text_of(render_summary(measure_summary(steady_run())), width=width)
    assert max(map(len, shown.splitlines())) <= width


def test_the_verdict_comes_before_the_notes():
    run = replace(
        steady_run(), status=RunStatus.PARTIAL, notes=("The clocks of two ranks differ.",)
    )
    text = summary_of(run)
    assert text.startswith("hand-made  partial")
    verdict, note = text.index("Communication is exposed"), text.index("note: The clocks")
    assert verdict < note < text.index("Typical step of rank 0")


def test_a_single_timed_step_is_one_step():
    assert "Key numbers of rank 0 (1 timed step)\n" in summary_of(steady_run(num_steps=2))


def test_units_of_an_import_show_no_time_that_its_trace_does_not_tell():
    builder = RunBuilder(units=("layers.0",), source="imported")
    rank = builder.rank(0)
    rank.step(0, 0, 100)
    rank.all_gather("layers.0", 10, 50)
    compute = text_of(render_units(measure_units(builder.build()))).split("copies of each unit\n")[
        1
    ]
    assert "0 ns" not in compute
    assert compute.splitlines()[1].split()[-5:-1] == ["–"] * 4


def test_the_backend_of_an_emulated_run_is_called_so():
    builder = RunBuilder(backend="fake")
    builder.rank(0).step(0, 0, 10)
    headline = text_of(render_summary(measure_summary(builder.build()))).splitlines()[1]
    assert headline.split(" · ")[2] == "emulated"
