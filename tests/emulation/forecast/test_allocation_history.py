"""The history of a training run follows from the storage log of one step."""

from fsdp_inspect.emulation.forecast.allocation_history import NUM_STEPS, build_history
from fsdp_inspect.recording.storage_log import Moment, StorageEvent, StorageLog, TrackedStorage
from fsdp_inspect.trace.allocations import (
    ALL_GATHER_STREAM,
    COMPUTE_STREAM,
    REDUCE_SCATTER_STREAM,
    AllocationHistory,
    to_record,
)
from fsdp_inspect.trace.codes import MemoryCategory, Phase

PARAMETER, STATE, OLD_GRADIENT, GATHERED, REDUCED, INPUT, GRADIENT, OUTPUT = range(8)
CATEGORIES = (
    MemoryCategory.SHARDED_PARAMETER,
    MemoryCategory.OPTIMIZER_STATE,
    MemoryCategory.SHARDED_GRADIENT,
    MemoryCategory.ALL_GATHER_BUFFER,
    MemoryCategory.REDUCE_SCATTER_BUFFER,
    MemoryCategory.INPUT,
    MemoryCategory.SHARDED_GRADIENT,
    MemoryCategory.REDUCE_SCATTER_BUFFER,
)


def history() -> AllocationHistory:
    """A step that replaces a gradient of 100 bytes, with 8 ranks."""
    log = StorageLog(storages=[TrackedStorage(0, category) for category in CATEGORIES])

    def event(storage: int, num_bytes: int, phase: Phase) -> None:
        log.events.append(StorageEvent(storage, num_bytes, Moment(0, phase, 0)))

    event(PARAMETER, 101, Phase.OUTSIDE)
    event(STATE, 202, Phase.OUTSIDE)
    event(OLD_GRADIENT, 100, Phase.OUTSIDE)
    log.begin(Moment(0, Phase.OUTSIDE, 0))
    event(OLD_GRADIENT, 0, Phase.OUTSIDE)
    event(INPUT, 7, Phase.DATA)
    event(GATHERED, 800, Phase.FORWARD)
    event(GATHERED, 0, Phase.FORWARD)
    event(REDUCED, 1600, Phase.BACKWARD)
    event(OUTPUT, 200, Phase.BACKWARD)
    event(GRADIENT, 100, Phase.BACKWARD)
    event(OUTPUT, 0, Phase.BACKWARD)
    event(REDUCED, 0, Phase.BACKWARD)
    event(PARAMETER, 101, Phase.OPTIMIZER)  # no new size: nothing is allocated
    log.finish(Moment(0, Phase.OPTIMIZER, 0))
    found = build_history(log)
    assert found is not None
    return found


def test_the_optimizer_creates_its_state_in_the_first_step_and_nothing_grows() -> None:
    made = history()
    allocated = made.bytes[made.bytes > 0].tolist()

    assert made.num_steps == NUM_STEPS == 3
    assert made.num_resting == 1
    assert allocated[:7] == [101, 7, 800, 1600, 200, 100, 202]
    assert allocated.count(101) == allocated.count(202) == allocated.count(7) == 1
    assert allocated.count(100) == allocated.count(800) == NUM_STEPS
    alive: dict[int, int] = {}
    for storage, num_bytes in zip(made.storage.tolist(), made.bytes.tolist(), strict=True):
        if num_bytes > 0:
            alive[storage] = num_bytes
        else:
            del alive[storage]
    assert sorted(alive.values()) == [7, 100, 101, 202]


def test_streams_are_those_on_which_fsdp_allocates() -> None:
    made = history()
    streams = dict(zip(made.bytes.tolist(), made.stream.tolist(), strict=True))

    assert streams[800] == ALL_GATHER_STREAM
    assert streams[200] == streams[100] == REDUCE_SCATTER_STREAM
    assert streams[1600] == streams[101] == streams[202] == COMPUTE_STREAM


def test_a_history_is_read_back_from_its_record() -> None:
    made = history()
    back = to_record(made, run_id="run", rank=0, attempt=0).history()

    assert back.num_resting == made.num_resting
    assert back.num_steps == made.num_steps
    is_allocation = made.bytes > 0
    assert (back.bytes[is_allocation] == made.bytes[is_allocation]).all()
    assert (back.stream == made.stream * is_allocation).all()
    again = to_record(back, run_id="run", rank=0, attempt=0)
    assert again == to_record(made, run_id="run", rank=0, attempt=0)
