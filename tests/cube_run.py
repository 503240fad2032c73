"""Build a run of eight ranks on a mesh of three dimensions, of known work."""

from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.run import ProcessGroup
from tests.builders import RunBuilder

CUBE = [
    ProcessGroup(index=0, name="0", ranks=[0, 2], role="shard"),
    ProcessGroup(index=1, name="1", ranks=[0, 1], dimension="tp"),
    ProcessGroup(index=2, name="2", ranks=[0, 4], role="replicate"),
]
STRIDES = {1: 1, 0: 2, 2: 4}


def cube_run(work, *, steps=6, hosts=("a",) * 8):
    """Build eight ranks on a mesh of 2 x 2 x 2.

    A step is work, and then a collective in the TP group, one in the shard group and one across the
    replicas, 10 ns each.

    Args:
        work: The work of some ranks, in ns; 100 ns on the others. Or a mapping for each step.
        steps: The number of steps, if the work is one mapping.
        hosts: The machine of each rank.
    """
    works = [work] * steps if isinstance(work, dict) else work
    builder = RunBuilder(("",), world_size=8, process_groups=CUBE)
    for rank in range(8):
        builder.rank(rank).record = {"host": hosts[rank]}
    now = [0] * 8
    for step, late in enumerate(works):
        begins = list(now)
        calls = []
        now = [at + late.get(rank, 100) for rank, at in enumerate(now)]
        for group, stride in STRIDES.items():
            arrivals = list(now)
            now = [max(at, arrivals[rank ^ stride]) + 10 for rank, at in enumerate(arrivals)]
            calls += [(rank, group, arrivals[rank], now[rank]) for rank in range(8)]
        for rank in range(8):
            own = builder.rank(rank)
            own.step(step, begins[rank], now[rank])
            first = next(start for one, _, start, _ in calls if one == rank)
            own.forward("", begins[rank], first)
            for place, (_, group, start, end) in enumerate(c for c in calls if c[0] == rank):
                own.add(
                    EventKind.ALL_REDUCE, start, end, need_ns=start, group=group, bytes=4,
                    sequence=3 * step + place,
                )  # fmt: skip
    return builder.build()
