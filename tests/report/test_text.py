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
2 ranks · gloo · cpu · Decoder, 200 parameters

Communication is exposed for 25.0% of the step.
  Why: 250.0 ns of the typical step of 1.00 µs are exposed: all-gather 130.0 ns,
  reduce-scatter 100.0 ns, not FSDP 20.0 ns. By cause: floor 150.0 ns, bandwidth
  60.0 ns, late issue 40.0 ns. No setting hides the floor. Beyond the floor, the
  longest wait is for the all-gather of layers.1 in forward: 50.0 ns.
  Next: Try reshard_after_forward=False if memory allows: the backward gathers
  again, exposed for 30 ns.
  Or: Prefetch one unit ahead, so that the all-gather is issued earlier.

Typical step of rank 0 (mean over 3 steps)
forward                 200.0 ns  20.0%  ██████
backward                320.0 ns  32.0%  ██████████
FSDP copies              20.0 ns   2.0%  █
exposed all-gather      130.0 ns  13.0%  ▒▒▒▒
exposed reduce-scatter  100.0 ns  10.0%  ▒▒▒
exposed other            20.0 ns   2.0%  ▒
optimizer               100.0 ns  10.0%  ███
data                     50.0 ns   5.0%  ██
other                    60.0 ns   6.0%  ██
= step                   1.00 µs

Typical step of 3 timed steps of rank 0
step time               1.00 µs  p10 1.00 µs, p90 1.00 µs
communication          500.0 ns
exposed communication  250.0 ns
exposed floor          150.0 ns
overlap                  50.0%
peak allocated                –
peak reserved                 –  no allocator reserves memory on CPU
loss                          1  from 4

Waited for most, per typical step of rank 0
unit        collective      phase     n  in flight   exposed     floor
layers.0    reduce-scatter  backward  1   100 ns  100 ns  100 ns
layers.0    all-gather      forward   1    50 ns   50 ns   50 ns
layers.1    all-gather      forward   1   150 ns   50 ns
layers.1    all-gather      backward  1    30 ns   30 ns
(not FSDP)  all-reduce      backward  1    20 ns   20 ns

Ranks (typical step of each)
rank  host  step time  communication   exposed  overlap
0             1.00 µs       500 ns  250 ns   50%
1             1.00 µs       500 ns  250 ns   50%

Declared against observed
The run follows its plan: 18 collectives in 3 steps of 2 units, as expected.

Recorded run. 3 of 4 completed steps are timed; left out: step 0 (warm-up).
Times by method. measured: step, all-gather, reduce-scatter, all-reduce, copies,
forward, backward, optimizer, data."""

UNITS = """\
Collectives of each unit
unit      collective      n  message  duration   exposed  bus bandwidth
layers.0  all-gather      2     64 B   60.0 ns   50.0 ns     533.3 MB/s
          reduce-scatter  1     64 B  100.0 ns  100.0 ns     320.0 MB/s
layers.1  all-gather      2     64 B   90.0 ns   80.0 ns     355.6 MB/s
          reduce-scatter  1     64 B   80.0 ns      0 ns     400.0 MB/s

Compute and copies of each unit, per step
unit      params   forward  backward  recompute   copies  prefetched
layers.0     100  100 ns  160 ns          –  10 ns           1
layers.1     100  100 ns  160 ns          –  10 ns           1

Typical step of 3 timed steps of rank 0. n: per step. duration: mean of one
collective; exposed: of all of them in a step. forward and backward hold nested
units. bus bandwidth: message x (N-1)/N / duration for all-gather and
reduce-scatter, 2(N-1)/N for all-reduce, N ranks in the group (nccl-tests);
missing for N = 1."""


def summary_of(run):
    return text_of(render_summary(measure_summary(run)))


def one_rank(**manifest):
    builder = RunBuilder(world_size=1, **manifest)
    add_steady_step(builder.rank(0), 0, start=0)
    return builder


def test_a_summary_fits_eighty_columns_and_reads_so():
    assert summary_of(steady_run()) == SUMMARY


def test_units_read_so():
    assert text_of(render_units(measure_units(steady_run()))) == UNITS


def test_a_verdict_alone_is_the_verdict_of_the_summary():
    verdict = text_of(render_verdict(measure_summary(steady_run()).verdict))
    assert verdict in SUMMARY
    assert verdict.startswith("Communication is exposed")


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
    assert "What fills 8.00 MiB at the peak of memory step 7, rank 0, in backward" in shown
    assert "activation    6.00 MiB  layers.1  5.00 MiB" in shown
    assert "unattributed  2.00 MiB" in shown
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
    assert f"\n{MOST_RANKS - 1} " in shown
    assert f"\n{MOST_RANKS} " not in shown


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
    assert "The one timed step of rank 0\n" in summary_of(steady_run(num_steps=2))


def test_units_of_an_import_show_no_time_that_its_trace_does_not_tell():
    builder = RunBuilder(units=("layers.0",), source="imported")
    rank = builder.rank(0)
    rank.step(0, 0, 100)
    rank.all_gather("layers.0", 10, 50)
    compute = text_of(render_units(measure_units(builder.build()))).split("per step\n")[1]
    assert "0 ns" not in compute
    assert compute.splitlines()[1].split()[-5:-1] == ["–"] * 4


def test_the_backend_of_an_emulated_run_is_called_so():
    builder = RunBuilder(backend="fake")
    builder.rank(0).step(0, 0, 10)
    headline = text_of(render_summary(measure_summary(builder.build()))).splitlines()[1]
    assert headline.split(" · ")[1] == "emulated"
