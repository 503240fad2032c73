import pytest

from fsdp_inspect.analysis.breakdown_causes import measure_breakdown_causes
from fsdp_inspect.report.breakdown import MOST_RANKS, render_breakdown
from tests.builders import RunBuilder, steady_run
from tests.report.terminal_text import text_of

SHOWN = """\
The typical step of rank 0 takes 1.00 µs and waits 250.0 ns (25.0%) for
communication; its largest part is backward, 320.0 ns.

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

Why it waits (the causes add up to the exposed parts)
cause        exposed   share
floor       150.0 ns  60.0%  exposed time of the first all-gather of each
                              forward and the last reduction of each backward;
                              no compute runs next to them, so no setting
                              hides it
bandwidth    60.0 ns  24.0%  the rest of the exposed time: the transfer takes
                              longer than the compute that could hide it
late issue   40.0 ns  16.0%  exposed time that an earlier issue would have
                              saved: min(exposed, issue - earliest); earliest:
                              the dependencies of its stream and the previous
                              collective on its communicator have ended

The typical step of each rank (all parts: --rank, --json)
rank  steps  step time   exposed   forward  backward  optimizer     data
0         3    1.00 µs  250.0 ns  200.0 ns  320.0 ns   100.0 ns  50.0 ns
1         3    1.00 µs  250.0 ns  200.0 ns  320.0 ns   100.0 ns  50.0 ns

Recorded run hand-made. 3 of 4 completed steps are timed; left out: step 0
(warm-up)."""


def shown(run, **asked):
    return text_of(render_breakdown(measure_breakdown_causes(run, **asked)))


def test_a_breakdown_reads_so():
    assert shown(steady_run()).startswith(SHOWN)


def test_one_step_alone_is_not_called_typical():
    text = shown(steady_run(), step=0)
    assert text.startswith("Step 0 of rank 0 takes 1.00 µs")
    assert "\n\nStep 0 of rank 0\n" in text
    assert "Typical step of rank" not in text


def test_a_step_that_waits_for_nothing_says_so():
    builder = RunBuilder(world_size=1)
    builder.rank(0).step(0, 0, 100)
    text = shown(builder.build())
    assert "waits for no communication" in text
    assert "Why it waits" not in text


def test_without_a_timed_step_there_is_a_reason_and_no_zeros():
    text = shown(RunBuilder().build())
    assert text.startswith("Where a step goes cannot be told: no step is timed yet.")


def test_many_ranks_are_listed_in_part():
    text = shown(steady_run(world_size=MOST_RANKS + 4))
    assert f"the first {MOST_RANKS} of {MOST_RANKS + 4}" in text


@pytest.mark.parametrize("rank", [0, 1])
def test_another_rank_is_shown_when_asked_for(rank):
    assert shown(steady_run(), rank=rank).startswith(f"The typical step of rank {rank} ")
