"""Probe the network of a job with messages of many sizes: `torchrun ... -m fsdp_inspect.probe`.

    torchrun --nproc-per-node 8 -m fsdp_inspect.probe runs/<run>

A run whose units all have the same size shows how long their messages take, but not the latency.
The probe sends messages from 4 KiB to 64 MiB through process groups like those of the run, without
the model. It writes `network.json` into the run folder. `simulate`, `advise` and What-if then use
its latency.
"""

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from fsdp_inspect.errors import FsdpInspectError, RecordingError
from fsdp_inspect.formatting import format_bytes, format_ns
from fsdp_inspect.recording.launcher import RankParser, say
from fsdp_inspect.statistics import median
from fsdp_inspect.store.folder import read_manifest
from fsdp_inspect.store.records import encode_record
from fsdp_inspect.store.schema import PROBE_FILE
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.network_probe import NetworkProbe, ProbedMessage
from fsdp_inspect.trace.run import RunManifest
from fsdp_inspect.writing import replace_file

_DESCRIPTION = """\
Measure the latency and bandwidth between the ranks of a job.

A run whose messages all have one size does not show the latency. Start the
probe with the launcher of the training, on the same machines, while they are
idle. It sends messages of many sizes through process groups like those of the
run, and writes network.json into the run folder. Then simulate, advise and the
What-if page use the measured latency.
"""
_EPILOG = """\
examples:
  torchrun --nproc-per-node 8 -m fsdp_inspect.probe runs/<run>
  fsdp-inspect advise runs/<run>      predictions now use the measured latency
"""
_KINDS = (EventKind.ALL_GATHER, EventKind.REDUCE_SCATTER, EventKind.ALL_REDUCE)
_SMALLEST_BYTES, _LARGEST_BYTES = 4 << 10, 64 << 20
# torch 2.13 warns at each of the older names.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_ALWAYS_BYTES = 1 << 20
_LONGEST_SHARE = 0.005
"""Sizes above `_ALWAYS_BYTES` grow until one message takes this fraction of the whole time."""
_WARM_UP_ROUNDS, _LEAST_ROUNDS = 1, 4


class _Measurement(NamedTuple):
    kind: EventKind
    ranks: tuple[int, ...]
    bytes: int


def main(arguments: Sequence[str] | None = None) -> None:
    """Probe the network, write the result and print it.

    Args:
        arguments: The command line; None means that of this process.

    Raises:
        SystemExit: 1, with one line on stderr, if the run or the job is unsuitable.
    """
    parser = _make_parser()
    given = parser.parse_args(arguments)
    if "RANK" not in os.environ:
        parser.error(
            "the variable RANK is missing. Expected several ranks. Start the probe with the "
            "launcher of the training: torchrun --nproc-per-node N -m fsdp_inspect.probe RUN."
        )
    try:
        probe = _run(given.run, given.seconds)
    except FsdpInspectError as error:
        say(str(error))
        raise SystemExit(1) from None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if int(os.environ["RANK"]) == 0:
        print(describe(probe))
        print(f"Written: {given.run / PROBE_FILE}. Next: fsdp-inspect advise {given.run}")


def _make_parser() -> argparse.ArgumentParser:
    parser = RankParser(
        prog="python -m fsdp_inspect.probe",
        usage="torchrun ... -m fsdp_inspect.probe [--seconds N] RUN",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument(
        "run", type=Path, metavar="RUN", help="run folder; rank 0 reads and writes it"
    )
    parser.add_argument(
        "--seconds", type=_seconds, default=2.0, help="duration of the probe (default: 2)"
    )
    return parser


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= 600:
        raise argparse.ArgumentTypeError(f"invalid duration {text!r}. Expected 0.1 to 600 seconds")
    return value


def describe(probe: NetworkProbe) -> str:
    """A table of the measured durations: a row for each size, a column for each kind and group."""
    columns = list(dict.fromkeys((one.kind, tuple(one.ranks)) for one in probe.messages))
    found = {(one.kind, tuple(one.ranks), one.bytes): one.duration_ns for one in probe.messages}
    names = [f"{kind.replace('_', '-')} x{len(ranks)}" for kind, ranks in columns]
    lines = ["  ".join([f"{'message':>9}", *(f"{name:>17}" for name in names)])]
    for size in sorted({one.bytes for one in probe.messages}):
        times = [found.get((*column, size)) for column in columns]
        cells = [f"{'' if ns is None else format_ns(ns):>17}" for ns in times]
        lines.append("  ".join([f"{format_bytes(size):>9}", *cells]))
    return "\n".join(lines)


def _run(run: Path, seconds: float) -> NetworkProbe:
    """Probe on all ranks; rank 0 writes the result.

    Raises:
        FsdpInspectError: Rank 0 cannot read the run, or the job has another size; raised on every
            rank.
    """
    device = _device()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    groups = _groups_of(_agreed_ranks(run))
    prober = _Prober(device, seconds)
    for ranks, group in groups:
        prober.measure(ranks, group)
    probe = NetworkProbe(
        created_unix_ns=time.time_ns(),
        world_size=dist.get_world_size(),
        backend=dist.get_backend(),
        device_type=device.type,
        messages=prober.messages(),
    )
    if dist.get_rank() == 0:
        replace_file(run / PROBE_FILE, encode_record(probe))
    return probe


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def _agreed_ranks(run: Path) -> list[tuple[int, ...]]:
    """The groups of rank 0 in the run, as read by rank 0.

    Raises:
        FsdpInspectError: As in `_run`.
    """
    answer: list[object] = [None]
    if dist.get_rank() == 0:
        try:
            answer = [_ranks_of(read_manifest(run), dist.get_world_size())]
        except (FsdpInspectError, OSError) as error:
            answer = [str(error)]
    dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], str):
        raise RecordingError(answer[0])
    assert isinstance(answer[0], list)
    return answer[0]


def _ranks_of(manifest: RunManifest, world_size: int) -> list[tuple[int, ...]]:
    if manifest.source == "emulated":
        raise RecordingError(
            f"Run {manifest.run_id!r} is emulated, so its network is a model whose latency is "
            "known. Expected a recorded run. There is nothing to measure."
        )
    if manifest.world_size != world_size:
        raise RecordingError(
            f"The probe has {world_size} ranks, but run {manifest.run_id!r} has "
            f"{manifest.world_size}. Expected equal numbers. Start the probe as the training."
        )
    roles = ("shard", "replicate", "post_forward")
    found = [tuple(each.ranks) for each in manifest.process_groups if each.role in roles]
    several = [ranks for ranks in dict.fromkeys(found) if len(ranks) > 1]
    return several or [tuple(range(world_size))]


def _groups_of(
    first: Sequence[tuple[int, ...]],
) -> Iterator[tuple[tuple[int, ...], dist.ProcessGroup]]:
    """Create each group of rank 0 and its shifted copies; yield the group of this rank.

    In a device mesh, the groups of one dimension are shifted copies of each other. All of them
    communicate at the same time, as in training.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for ranks in first:
        own, covered = None, set[int]()
        for start in range(world_size):
            shifted = [start + one - ranks[0] for one in ranks]
            if covered.intersection(shifted) or max(shifted) >= world_size or min(shifted) < 0:
                continue
            covered.update(shifted)
            group = dist.new_group(shifted)
            own = group if rank in shifted else own
        assert isinstance(own, dist.ProcessGroup), f"rank {rank} is in no copy of {ranks}"
        yield ranks, own


class _Prober:
    """Measures messages of growing sizes, in rounds, until the time is over."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self._device = device
        self._limit_ns = round(seconds * 1e9)
        self._durations: dict[_Measurement, list[int]] = {}

    def measure(self, ranks: tuple[int, ...], group: dist.ProcessGroup) -> None:
        """Measure all kinds in one group; the limits of time are those of the slowest rank."""
        spent, rounds, largest = 0, 0, _LARGEST_BYTES
        while spent < self._limit_ns or rounds < _LEAST_ROUNDS:
            started = time.perf_counter_ns()
            for kind in _KINDS:
                size = _SMALLEST_BYTES
                while size <= largest:
                    elapsed = self._time(kind, size, group)
                    if rounds >= _WARM_UP_ROUNDS:
                        found = self._durations.setdefault(_Measurement(kind, ranks, size), [])
                        found.append(elapsed)
                    if elapsed > _LONGEST_SHARE * self._limit_ns and rounds < _WARM_UP_ROUNDS:
                        largest = min(largest, max(size, _ALWAYS_BYTES))
                    size *= 2
            spent += self._slowest(time.perf_counter_ns() - started)
            rounds += 1

    def messages(self) -> list[ProbedMessage]:
        """The median of each measured message."""
        return [
            ProbedMessage(
                kind=one.kind.label,
                ranks=list(one.ranks),
                bytes=one.bytes,
                count=len(durations),
                duration_ns=median(durations) or 0,
            )
            for one, durations in self._durations.items()
        ]

    def _time(self, kind: EventKind, num_bytes: int, group: dist.ProcessGroup) -> int:
        """The duration of one collective on the slowest rank, ns."""
        num_ranks = dist.get_world_size(group)
        whole = torch.zeros(num_bytes // 4 // num_ranks * num_ranks, device=self._device)
        part = torch.zeros(len(whole) // num_ranks, device=self._device)
        dist.barrier()
        self._synchronise()
        started = time.perf_counter_ns()
        if kind is EventKind.ALL_GATHER:
            _all_gather(whole, part, group=group)
        elif kind is EventKind.REDUCE_SCATTER:
            _reduce_scatter(part, whole, group=group)
        else:
            dist.all_reduce(whole, group=group)
        self._synchronise()
        return self._slowest(time.perf_counter_ns() - started)

    def _slowest(self, elapsed: int) -> int:
        """The longest time over all ranks; every rank gets the same result."""
        longest = torch.tensor([elapsed], dtype=torch.int64, device=self._device)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        return int(longest.item())

    def _synchronise(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
