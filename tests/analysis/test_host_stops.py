"""The share of what stops a host in few steps."""

from fsdp_inspect.analysis.host_stops import measure_host_stops
from fsdp_inspect.analysis.summary import measure_summary
from fsdp_inspect.trace.host_work import COMPILATION, HostActivity, HostStop
from tests.builders import RunBuilder

MS = 1_000_000


def test_a_rare_stop_is_a_part_of_the_mean_step_and_not_of_the_typical_one() -> None:
    builder = RunBuilder(world_size=1)
    rank, start = builder.rank(0), 0
    for step in range(20):
        end = start + (1000 if step % 5 == 4 else 100) * MS
        rank.step(step, start, end)
        start = end
    stop = HostStop(
        what=COMPILATION, place="t.py:3", count=4, num_steps=4, duration_ns=4 * 900 * MS
    )
    rank.record["host_work"] = HostActivity(num_steps=20, stops=[stop])
    run = builder.build()
    (cost,) = measure_host_stops(run).stops
    assert (cost.duration_ns, cost.mean_step_ns) == (180 * MS, 280 * MS)
    assert measure_summary(run).verdict.sentence == "Recompilations take 64.3% of the mean step."
