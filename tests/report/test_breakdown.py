import pytest

from fsdp_inspect.analysis.breakdown_causes import measure_breakdown_causes
from fsdp_inspect.report.text import render_breakdown
from tests.builders import RunBuilder, steady_run
from tests.report.terminal_text import text_of

SHOWN = """\
Typical step of rank 0: 1.00 µs.
  Exposed communication: 250 ns (25%). Largest part: backward, 320 ns.

Parts of the typical step (mean over 3 steps)
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

Communication by mesh dimension
dimension  exposed  share  per step  bytes
shard       230 ns    23%         6  384 B
other        20 ns     2%         1    4 B
= exposed   250 ns

Causes of the exposed communication
cause       exposed  share  definition
floor        150 ns    60%  the rest of the exposed time of the first
                            all-gather of each forward and the last reduction
                            of each backward; no compute runs next to them: it
                            can be shortened, not hidden
transfer      60 ns    24%  the rest of the exposed time: the transfer takes
                            longer than the compute that could hide it
late issue    40 ns    16%  exposed time that an earlier issue would have
                            saved: min(exposed, issue - earliest); earliest:
                            the moment at which the dependencies of its stream
                            and the previous collective on its communicator
                            have ended
"""


def shown(run, **asked):
    return text_of(render_breakdown(measure_breakdown_causes(run, **asked)))


def test_a_breakdown_reads_so():
    assert shown(steady_run()).startswith(SHOWN)


def test_one_step_alone_is_not_called_typical():
    text = shown(steady_run(), step=0)
    assert text.startswith("Step 0 of rank 0: 1.00 µs.")
    assert "\nParts of the step\n" in text


def test_a_step_that_waits_for_nothing_says_so():
    builder = RunBuilder(world_size=1)
    builder.rank(0).step(0, 0, 100)
    text = shown(builder.build())
    assert "No communication is exposed." in text
    assert "Causes" not in text


def test_without_a_timed_step_there_is_a_reason_and_no_zeros():
    text = shown(RunBuilder().build())
    assert text.startswith("The breakdown is unknown: the run has no timed step.")


@pytest.mark.parametrize("rank", [0, 1])
def test_another_rank_is_shown_when_asked_for(rank):
    assert shown(steady_run(), rank=rank).startswith(f"Typical step of rank {rank}: ")
