"""Convert the trace of one rank to events of a run, and note the data that the trace lacks."""

import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fsdp_inspect.errors import ImportingError
from fsdp_inspect.importing.collective_rows import Owners, find_implied_owners, find_owners
from fsdp_inspect.importing.communications import Communications, find_gloo
from fsdp_inspect.importing.device_rows import DeviceRows, DeviceWork
from fsdp_inspect.importing.host_calls import HostCalls, find_captures, find_host_calls
from fsdp_inspect.importing.host_rows import HostRows
from fsdp_inspect.importing.implied_units import imply_by_order, imply_by_size
from fsdp_inspect.importing.kineto_events import LATEST_NS, Category, KinetoTrace, read_trace
from fsdp_inspect.importing.messages import NOTHING, GroupNames, read_whole
from fsdp_inspect.importing.names import RunNames
from fsdp_inspect.importing.trace_file import ImportLimits
from fsdp_inspect.importing.trace_sources import MARKS_KEY, NOTES_KEY
from fsdp_inspect.importing.unit_ranges import UnitRanges
from fsdp_inspect.importing.windows import PhaseRanges, StepMarks
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.host_work import HostActivity
from fsdp_inspect.trace.intervals import Intervals
from fsdp_inspect.trace.kernels import KernelRecord
from fsdp_inspect.trace.run import UNITS_FROM_FSDP1, UNITS_FROM_ORDER, UNITS_FROM_RANGES
from fsdp_inspect.trace.tables import MISSING_INT, EventTable

_NCCL = re.compile(r"(?:nccl|rccl)(?:Dev|Kernel|:)|void (?:nccl|rccl)", re.IGNORECASE)
"""The names of kernels and operators of NCCL and RCCL, which torch calls nccl."""
_OF_TRAINING = re.compile(
    r"backward|(?<![a-z])bwd|_bwd|autograd::engine|optimizer\b|optimizer\.|multi_tensor|dgrad|wgrad"
    r"|reduce_?scatter|zero_grad|_foreach_(?:add|lerp|addc)|(?<![a-z])adam|grad_?scal",
    re.IGNORECASE,
)
"""Names of operators, kernels and ranges of a backward pass or an optimizer."""
_OF_INFERENCE = re.compile(
    r"paged_?attention|reshape_and_cache|kv_?cache|batch(?:decode|prefill)|flash_fwd_splitkv"
    r"|decode_attention|(?<![a-z])(?:vllm|sglang|lmdeploy)(?![a-z])|top_?k_?top_?p",
    re.IGNORECASE,
)
"""Names of kernels and ranges of servers of language models."""

# --- Find signs that a trace lacks work of the device, or joins the work of several devices.
#
# The times of such a trace look like those of a slow host or of a fast network. `TraceGaps` keeps
# the signs, so that no conclusion is drawn from these times.

_LAUNCH = re.compile(r"launch_?kernel|kernel_?launch", re.IGNORECASE)
"""cudaLaunchKernel, cuLaunchKernelEx, hipExtModuleLaunchKernel, urEnqueueKernelLaunch, ..."""
_DEVICE_BACKEND = re.compile(r"(nccl|rccl|xccl|ccl|hccl|mccl)\b")
"""Backends that communicate between devices only."""
_DEVICE_CALL = re.compile(r"(nccl|rccl|xccl|hccl|mccl):")
"""Marks on the host around a collective between devices."""
_LEAST_SHARE = 0.05
"""The least share of the kernels with which a device counts."""


@dataclass(frozen=True, slots=True)
class TraceGaps:
    """What a trace may lack. 0 or False: no sign of it."""

    lacks_kernels: bool
    """The trace has launches of kernels or a backend of devices, but no kernels."""
    num_launches: int
    """Number of kernel launches before the last one whose kernel is in the trace."""
    num_lost_launches: int
    """Number of these launches whose kernel is not in the trace."""
    num_devices: int
    """Number of devices with at least 5% of the kernels."""
    longest_pause_ns: int
    """The longest time in which the device does nothing; 0 if the trace is divided into steps."""
    duration_ns: int
    """From the first to the last work of the device."""


def find_gaps(trace: KinetoTrace, backend: str, *, is_whole_trace: bool) -> TraceGaps:
    """Find the gaps of a trace.

    Args:
        trace: The trace of one process.
        backend: The backend that the trace states; empty: unknown.
        is_whole_trace: Whether the trace is one step.
    """
    launches = trace.events[Category.LAUNCH]
    is_launch = np.array([bool(_LAUNCH.search(name)) for name in trace.names], dtype=bool)
    launches = launches.where(is_launch[launches.name])
    captured = find_captures(trace).covers(launches.thread, launches.start_ns)
    launches = launches.where(~captured)
    kernels, copies = trace.events[Category.KERNEL], trace.events[Category.MEMORY_COPY]
    known = np.concatenate([kernels.correlation, copies.correlation])
    has_work = np.isin(launches.correlation, known) | (launches.correlation < 0)
    last = int(launches.start_ns[has_work].max(initial=-1))
    before = launches.start_ns <= last
    busy = Intervals.of(
        np.concatenate([kernels.start_ns, copies.start_ns]),
        np.concatenate([kernels.end_ns, copies.end_ns]),
    )
    pauses = busy.starts[1:] - busy.ends[:-1]
    is_device_trace = len(launches) > 0 or bool(_DEVICE_BACKEND.match(backend))
    is_device_trace |= any(_DEVICE_CALL.match(name) for name in trace.names)
    is_device_trace |= NOTES_KEY in trace.other_values
    duration_ns = int(busy.ends[-1] - busy.starts[0]) if len(busy) else 0
    longest = duration_ns if MARKS_KEY in trace.other_values else int(pauses.max(initial=0))
    return TraceGaps(
        lacks_kernels=is_device_trace and len(kernels) == 0,
        num_launches=int(np.count_nonzero(before)),
        num_lost_launches=int(np.count_nonzero(before & ~has_work)),
        num_devices=_count_devices(trace),
        longest_pause_ns=longest if is_whole_trace else 0,
        duration_ns=duration_ns,
    )


def _count_devices(trace: KinetoTrace) -> int:
    """Count the devices that run kernels. The process of a device event is its device."""
    kernels = trace.events[Category.KERNEL]
    devices = np.array(trace.processes, dtype=np.int64)[kernels.thread]
    _, counts = np.unique(devices, return_counts=True)
    return int(np.count_nonzero(counts >= _LEAST_SHARE * len(kernels)))


_NO_TRAINING = (
    "The trace shows no backward pass and no optimizer step (inferred from names): it may be of "
    "inference."
)
_SHORT_RATIO = 0.05
_SHORT_START = (
    f"The first step is over {_SHORT_RATIO:.0%} shorter than the others. A step begins when the "
    "work of the one before has ended, and the first one at its first kernel. So it may lack idle "
    "time, and the typical step and its host-bound time may be too short. Profile more steps."
)
_UNIX_AGE_NS = 10**18
"""Larger times are since 1970 instead of since the base time of the trace."""


@dataclass(frozen=True, slots=True)
class RankTrace:
    """One rank of an import."""

    rank: int | None
    """The rank according to the trace; None if the trace does not contain it."""
    world_size: int | None
    backend: str
    device_type: str
    device_name: str
    device_memory_bytes: int | None
    host: str
    versions: dict[str, str]
    events: EventTable
    """The events; their times start from the trace's first event."""
    kernels: KernelRecord
    host_work: HostActivity | None
    """The calls in which the host waits for the device; None: not in the trace."""
    num_steps: int
    wall_start_ns: int | None
    """Time of the first event since 1970; None if the trace does not contain it."""
    unit_origin: str
    """The `recorded_by` of the units."""
    notes: tuple[str, ...]
    """Data that this trace does not contain."""
    num_events: int
    """Events of all categories in the trace."""
    num_device_events: int
    """Kernels and copies."""
    num_unread_events: int
    """Complete events of unknown categories."""
    gaps: TraceGaps
    """Work of the device that the trace may lack."""
    is_whole_trace: bool
    """Whether the whole trace is one step, because it has no marks or none were asked for."""
    lacks_training: bool
    """Whether the trace shows operators or kernels of inference, and none of training."""


def read_rank(trace: KinetoTrace, names: RunNames, *, by_step: bool | None) -> RankTrace:
    """Turn a trace into a rank's events.

    Args:
        trace: The trace of one process.
        names: The run's units and groups; new ones are added.
        by_step: Whether each ProfilerStep is a step, or the whole trace is one step. None: each
            ProfilerStep, if the trace has any.

    Raises:
        ImportingError: The trace has neither kernels nor communication, all of its durations are
            0, or it lacks the ProfilerStep marks that `by_step` requires.
    """
    distributed = trace.other_values.get("distributedInfo")
    distributed = distributed if isinstance(distributed, dict) else {}
    groups = GroupNames.of(distributed)
    num_kernels = len(trace.events[Category.KERNEL])
    has_kernels = num_kernels > 0
    has_launches = len(trace.events[Category.LAUNCH]) > 0
    _check_durations(trace)
    needs_marks = MARKS_KEY in trace.other_values
    splits = needs_marks or StepMarks.has_any(trace) if by_step is None else by_step
    marks = StepMarks.of(trace) if splits else StepMarks.whole()
    ranges = UnitRanges.of(trace)
    phases = PhaseRanges.of(trace, ranges)
    backend = str(distributed.get("backend", ""))
    gaps = find_gaps(trace, backend, is_whole_trace=marks.is_whole_trace)
    maker = _find_rows(trace, groups, ranges, phases, marks, names)
    trace, comms = maker.trace, maker.comms
    _check_content(trace, comms, has_kernels)
    owners, units = _own(trace, comms, ranges)
    events, kernels = maker.make(owners, units), maker.kernels(owners, units)
    names.learn_ranks(groups)
    origin_ns = int(min(events.start_ns.min(), events.issue_ns.min()))
    device = _device(trace.other_values)
    lacks_training = _lacks_training(trace.names)
    lacks_launches = has_kernels and not has_launches
    notes = _notes(trace, comms, ranges, marks, phases, lacks_launches=lacks_launches)
    if lacks_training:
        notes.append(_NO_TRAINING)
    if has_kernels and _has_short_start(events):
        notes.append(_SHORT_START)
    return RankTrace(
        rank=read_whole(distributed.get("rank")),
        world_size=groups.world_size or None,
        backend=backend or _backend_of(trace, comms, has_kernels=has_kernels),
        device_type="cuda" if has_kernels else "cpu",
        device_name=str(device.get("name", "")),
        device_memory_bytes=read_whole(device.get("totalGlobalMem")),
        host=str(trace.other_values.get("host_name", "")),
        versions=_versions(trace.other_values, distributed),
        events=_shifted(events, origin_ns),
        kernels=kernels,
        host_work=_numbered(maker.calls, names, ranges) if isinstance(maker, DeviceRows) else None,
        num_steps=len(marks.number),
        wall_start_ns=_wall_ns(trace.other_values, origin_ns),
        unit_origin=_origin(ranges),
        notes=tuple(notes),
        num_events=trace.num_events,
        num_device_events=num_kernels + len(trace.events[Category.MEMORY_COPY]),
        num_unread_events=sum(trace.unread.values()),
        gaps=gaps,
        is_whole_trace=marks.is_whole_trace,
        lacks_training=lacks_training,
    )


def _find_rows(
    trace: KinetoTrace,
    groups: GroupNames,
    ranges: UnitRanges,
    phases: PhaseRanges,
    marks: StepMarks,
    names: RunNames,
) -> DeviceRows | HostRows:
    if len(trace.events[Category.KERNEL]) == 0:
        return HostRows(trace, find_gloo(trace, groups), ranges, phases, marks, names)
    work = DeviceWork.of(trace, groups)
    parts = (work.comms, work.compute, work.copies)
    busy = Intervals.of(
        np.concatenate([part.start_ns for part in parts]),
        np.concatenate([part.end_ns for part in parts]),
    )
    calls = find_host_calls(trace, ranges, phases, marks, busy)
    trace = trace.without(Category.KERNEL, Category.LAUNCH)  # `work` contains them
    return DeviceRows(trace, work, ranges, phases, marks, names, calls)


def _numbered(calls: HostCalls, names: RunNames, ranges: UnitRanges) -> HostActivity | None:
    """The activity with the numbers of the units in `names`."""
    units = [names.unit_index(unit) for unit in ranges.units]
    return calls.activity and calls.activity.with_units(units)


def read_kernels(trace: KinetoTrace, units: Sequence[str]) -> KernelRecord:
    """The kernels of a trace that the recorder wrote of its profiled steps.

    Args:
        trace: The trace.
        units: The names of the run's units, by index.

    Raises:
        ImportingError: The trace has no marks of steps.
    """
    names = RunNames({unit: index for index, unit in enumerate(units)})
    ranges = UnitRanges.of(trace)
    marks, phases = StepMarks.of(trace), PhaseRanges.of(trace, ranges)
    maker = _find_rows(trace, GroupNames.of({}), ranges, phases, marks, names)
    return maker.kernels(*_own(maker.trace, maker.comms, ranges))


def _has_short_start(events: EventTable) -> bool:
    """Whether the first step is clearly shorter than the median of the others."""
    steps = events.where(events.kind == EventKind.STEP)
    first, *others = (steps.end_ns - steps.start_ns)[np.argsort(steps.step)].tolist() or [0]
    return bool(others) and first < (1 - _SHORT_RATIO) * float(np.median(others))


def _lacks_training(names: Sequence[str]) -> bool:
    """Whether names show what the trace ran, and neither a backward pass nor an optimizer."""
    shows = any(name.startswith("aten::") or _OF_INFERENCE.search(name) for name in names)
    return shows and not any(_OF_TRAINING.search(name) for name in names)


def _backend_of(trace: KinetoTrace, comms: Communications, *, has_kernels: bool) -> str:
    """The backend that the communication of a trace shows; empty: it shows none."""
    if not len(comms):
        return ""
    if not has_kernels:
        return "gloo"
    return "nccl" if any(_NCCL.match(name) for name in trace.names) else ""


def _check_durations(trace: KinetoTrace) -> None:
    """Reject a trace that states no time of any work.

    Raises:
        ImportingError: All durations are 0.
    """
    kernels = trace.events[Category.KERNEL]
    work = [kernels] if len(kernels) else [each for each in trace.events.values() if len(each)]
    if work and all(np.array_equal(each.start_ns, each.end_ns) for each in work):
        raise ImportingError(
            f"{trace.name}: all durations are 0, so no time of any work is known. Expected "
            "durations above 0. The trace was edited or converted: export it again. For "
            "torch.profiler, that is prof.export_chrome_trace(path)."
        )


def _check_content(trace: KinetoTrace, comms: Communications, has_kernels: bool) -> None:
    if len(comms) and np.array_equal(comms.start_ns, comms.end_ns):
        raise ImportingError(
            f"{trace.name}: the durations of all {len(comms):,} communications are 0, so no wait "
            "is known. Expected durations above 0. The trace was edited or converted: export it "
            "again. For torch.profiler, that is prof.export_chrome_trace(path)."
        )
    is_log = NOTES_KEY in trace.other_values and StepMarks.has_any(trace)
    if has_kernels or len(comms) or is_log:
        return
    if trace.num_unpaired:
        raise ImportingError(
            f"{trace.name} has no usable kernels or communication: {trace.num_unpaired:,} of its "
            f"{trace.num_events:,} events state only a begin or only an end. Expected pairs of "
            "both, or complete events. The trace is damaged or was edited: export it again."
        )
    if trace.num_odd:
        raise ImportingError(
            f"{trace.name} has no usable kernels or communication: {trace.num_odd:,} of its "
            f"{trace.num_events:,} events have missing, NaN, negative or out-of-range times. "
            "Expected µs from 0. The trace is damaged or was edited: export it again."
        )
    raise ImportingError(
        f"{trace.name} has {trace.num_events:,} events, but no kernels and no communication. "
        "Expected a trace of a distributed training. With torch.profiler, profile with "
        "ProfilerActivity.CUDA, or on a CPU after init_process_group."
    )


def _origin(ranges: UnitRanges) -> str:
    if len(ranges.units):
        return UNITS_FROM_RANGES
    return UNITS_FROM_FSDP1 if ranges.is_fsdp1 else UNITS_FROM_ORDER


def _own(
    trace: KinetoTrace, comms: Communications, ranges: UnitRanges
) -> tuple[Owners, tuple[str, ...]]:
    """The owner of each collective, and the names of the units."""
    if len(ranges.units):
        return find_owners(comms, ranges), ranges.units
    if ranges.is_fsdp1:
        implied = imply_by_order(comms, ranges)
    else:
        implied = imply_by_size(comms, _marked_steps(trace, comms))
    return find_implied_owners(comms, implied), implied.names


def _marked_steps(trace: KinetoTrace, comms: Communications) -> Any:
    try:
        return StepMarks.of(trace).of_issue(comms.issue_ns)
    except ImportingError:
        return np.full(len(comms), NOTHING, dtype=np.int64)


def _shifted(events: EventTable, origin_ns: int) -> EventTable:
    """The same events on a clock that starts with the first event."""
    columns = events.columns()
    for name in ("issue_ns", "start_ns", "end_ns"):
        columns[name] = columns[name] - origin_ns
    need = events.need_ns
    is_known = need != MISSING_INT
    columns["need_ns"] = np.where(is_known, np.maximum(need - origin_ns, 0), MISSING_INT)
    return EventTable.from_columns(columns)


def _wall_ns(other_values: dict[str, Any], origin_ns: int) -> int | None:
    if origin_ns > _UNIX_AGE_NS:
        return origin_ns
    base = read_whole(other_values.get("baseTimeNanoseconds"))
    if base is None or not _UNIX_AGE_NS < base < LATEST_NS - origin_ns:
        return None
    return base + origin_ns


def _device(other_values: dict[str, Any]) -> dict[str, Any]:
    listed = other_values.get("deviceProperties")
    if isinstance(listed, list) and listed and isinstance(listed[0], dict):
        return listed[0]
    return {}


def _versions(other_values: dict[str, Any], distributed: dict[str, Any]) -> dict[str, str]:
    known = {
        "nccl": distributed.get("nccl_version"),
        "cuda_runtime": other_values.get("cuda_runtime_version"),
        "cuda_driver": other_values.get("cuda_driver_version"),
        "hip_runtime": other_values.get("hip_runtime_version"),
        "hip_driver": other_values.get("hip_driver_version"),
    }
    return {name: str(value) for name, value in known.items() if value not in (None, "")}


def _notes(
    trace: KinetoTrace,
    comms: Communications,
    ranges: UnitRanges,
    marks: StepMarks,
    phases: PhaseRanges,
    *,
    lacks_launches: bool,
) -> list[str]:
    notes = [_note_on_units(ranges)] if len(comms) or len(trace.events[Category.OPERATOR]) else []
    if trace.num_odd:
        notes.append(
            f"{trace.num_odd:,} of {trace.num_events:,} events were left out: their times are "
            "missing, negative or out of range."
        )
    if trace.unread:
        listed = ", ".join(f"{count:,} {name!r}" for name, count in [*trace.unread.items()][:3])
        notes.append(f"Events of unknown categories were left out: {listed}.")
    if trace.num_doubled:
        notes.append(
            f"{trace.num_doubled:,} events were left out, because the trace has the same event "
            "(name, thread, times and id) twice."
        )
    if trace.num_unpaired:
        notes.append(
            f"{trace.num_unpaired:,} events were left out, because their begin or their end is "
            "missing."
        )
    unknown = comms.bytes == NOTHING
    if np.any(unknown):
        kinds = Counter(EventKind(kind).label for kind in comms.kind[unknown].tolist())
        listed = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        notes.append(
            f"The size of some messages is unknown ({listed}), so they have no bandwidth. "
            "With torch.profiler, profile with record_shapes=True."
        )
    if marks.is_whole_trace:
        notes.extend(_note_on_steps(trace, phases))
    if lacks_launches:
        notes.append(
            "The trace has no kernel launches: the unit and the phase of a kernel are known only "
            "if its operator is known. With torch.profiler, profile with ProfilerActivity.CPU too."
        )
    of_source = trace.other_values.get(NOTES_KEY)
    if isinstance(of_source, list):
        notes += [note for note in of_source if isinstance(note, str)]
    return notes


def _note_on_steps(trace: KinetoTrace, phases: PhaseRanges) -> Iterator[str]:
    """Note that a whole trace is one step. Without marks, one optimizer step shows one step."""
    marks = sum(name.startswith("ProfilerStep#") for name in trace.names)
    updates = len(Intervals.of(phases.optimizer.start_ns, phases.optimizer.end_ns))
    if marks > 1:
        yield (
            f"The whole trace was imported as one step; it has {marks} ProfilerStep marks. "
            "Import without --whole-trace for one step at each mark."
        )
    elif marks == 0 and updates != 1:
        has = f"has {updates} optimizer steps" if updates else "may have several steps"
        by = "an NVTX or ROCTx range" if MARKS_KEY in trace.other_values else "prof.step()"
        yield (
            f"The trace has no marks of steps, so all of it is one step. It {has}. Mark each step "
            f"with {by}, and profile again."
        )


def _note_on_units(ranges: UnitRanges) -> str:
    if len(ranges.units):
        return (
            "Units come from FSDP's own ranges. Their numbers of parameters come from their "
            "messages and include padding."
        )
    if ranges.is_fsdp1:
        return (
            "FSDP1's ranges name no unit: units are numbered in the order of their first "
            "all-gather. All-gathers and reductions in backward are assigned by size and reversed "
            "order (inferred)."
        )
    return (
        "The trace has no FSDP ranges: collectives of one kind, size and group form one unit "
        "(inferred). Their modules, their prefetches and the forward and backward of each unit are "
        "unknown. Profile a fully_shard model with torch 2.6 or newer to see them."
    )


# --- Read the trace of the profiled steps of a recorded run.


def read_profile(content: bytes, units: Sequence[str]) -> KernelRecord:
    """The kernels of the profiled steps.

    Args:
        content: The trace, gzipped.
        units: The names of the run's units, by index.

    Raises:
        ImportingError: The trace is damaged, or not of the recorder.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json.gz"
        path.write_bytes(content)
        return read_kernels(read_trace(path, ImportLimits()), units)
