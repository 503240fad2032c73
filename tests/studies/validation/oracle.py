"""Compare the `stream` model with torch's FSDP2: random plans on virtual time.

There are two comparisons, both without noise:

- played: the simulator and torch's code on virtual streams run a step of known work
- predicted: the recorder's CUDA path records torch's code, and another plan is predicted from this
  run; the truth is torch's code under that plan

Errors of exposed time are by unit, as a fraction of the step.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_inspect.analysis.step_selection import collective_rows
from fsdp_inspect.simulation.changes import Changes, apply_changes
from fsdp_inspect.simulation.simulate import simulate_plan
from fsdp_inspect.simulation.workload import Microbatch, UnitPolicy, UnitWork
from fsdp_inspect.store.reduction.step_parts import reduce_rank
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.intervals import Intervals
from fsdp_inspect.trace.plan import Plan
from tests.recording import virtual_training
from tests.recording.virtual_device import VirtualDevice
from tests.recording.virtual_training import Replay
from tests.simulation.oracle import Case, Layer, play_with_torch
from tests.simulation.test_recorded_streams import as_run, step_ns
from tests.simulation.test_schedule import simulate_step, spans_of

US, MS = 1_000, 1_000_000
_COLLECTIVES = (EventKind.ALL_GATHER, EventKind.REDUCE_SCATTER, EventKind.ALL_REDUCE)
_COMPUTE = ("forward", "backward")

Spans = Iterable[tuple[str, str, int, int]]
"""Spans with kind, unit, start and end."""


@dataclass(frozen=True, slots=True)
class OracleOutcome:
    """One random case."""

    step_error: float
    exposed_errors: tuple[float, ...]
    """By unit, the predicted minus the true exposed time, as a fraction of the true step."""
    is_host_bound: bool = False
    """Whether the host launches a unit's work more slowly than the device runs it.

    The recorder's events on the stream then enclose the launching. The recording does not show the
    duration of the work itself, which a plan with a host that runs ahead needs."""


def judge_played(count: int, on_case: Callable[[], object]) -> list[OracleOutcome]:
    """Judge random cases of known work; a quarter of them have replicas (HSDP)."""
    draw = random.Random(0)
    outcomes = []
    with _fake_ranks(8):
        plain = init_device_mesh("cpu", (8,))
        hybrid = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
        for number in range(count):
            has_replicas = number % 4 == 0
            case = _random_case(draw, has_replicas=has_replicas)
            duration, device = play_with_torch(case, hybrid if has_replicas else plain)
            step = simulate_step(case)
            truth = _exposed_of(device.log)
            found = _exposed_of(spans_of(step, (*_COLLECTIVES, EventKind.COMPUTE)))
            outcomes.append(
                OracleOutcome(
                    step.duration_ns / duration - 1,
                    tuple((found.get(unit, 0) - truth[unit]) / duration for unit in truth),
                )
            )
            on_case()
    return outcomes


def judge_predicted(count: int, on_case: Callable[[], object]) -> list[OracleOutcome]:
    """Judge random speeds: from a recording of the plain plan, a random other plan and link."""
    draw = random.Random(1)
    outcomes = []
    with _fake_ranks(4):
        for _ in range(count):
            speed = {
                "gather_ms": draw.uniform(0.2, 8),
                "scatter_ms": draw.uniform(0.2, 8),
                "forward_ms": draw.uniform(1, 6),
                "host_ms": draw.choice([0.05, 0.5, draw.uniform(1, 6)]),
            }
            changes = Changes(
                forward_prefetch=draw.randrange(4),
                reshard_after_forward=draw.choice([None, False]),
            )
            run = as_run(_replay(speed))
            plan = apply_changes(Plan.from_dict(run.manifest.plan), changes)
            link_ms = draw.choice([None, draw.uniform(0.2, 8)])
            if link_ms is None:
                predicted = simulate_plan(run, plan).predicted
            else:  # a link with latency only, since all messages here have equal durations
                network = {"bus_bytes_per_s": 1e18, "latency_ns": link_ms * MS}
                predicted = simulate_plan(run, plan, **network).predicted
                speed |= {"gather_ms": link_ms, "scatter_ms": link_ms}
            actual = _replay(speed, changes)
            duration = step_ns(actual)
            truth = _exposed_by_unit(actual)
            outcomes.append(
                OracleOutcome(
                    predicted.step_time_ns / duration - 1,
                    tuple(
                        (unit.exposed_ns - truth.get(unit.fqn, 0)) / duration
                        for unit in predicted.units
                    ),
                    is_host_bound=speed["host_ms"] > speed["forward_ms"],
                )
            )
            on_case()
    return outcomes


@contextmanager
def _fake_ranks(world_size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _random_case(draw: random.Random, *, has_replicas: bool) -> Case:
    """Blocks of random durations under a random plan, link and host."""
    num_layers = draw.randint(1, 8)
    link, host_ns = draw.uniform(0.1, 6), draw.choice([0, 10 * US, 100 * US, 2 * MS])
    layers = [
        _random_layer(draw, unit, num_layers, link, host_ns, (2,) if has_replicas else (2, 4))
        for unit in range(num_layers + 1)
    ]
    if not has_replicas:
        layers = [replace(each, work=replace(each.work, all_reduce_ns=0)) for each in layers]
    last = draw.choice([0, 0, 1, 2])
    syncs_each = draw.random() < 0.5
    return Case(
        head=layers[0],
        layers=layers[1:],
        input_needs_grad=draw.random() < 0.5,
        max_reduce_buffers=draw.randint(1, 3),
        separate_reduce_group=not has_replicas and draw.random() < 0.3,
        microbatches=[Microbatch(reduces=syncs_each or at == last) for at in range(last + 1)],
    )


def _random_layer(
    draw: random.Random,
    unit: int,
    num_layers: int,
    link: float,
    host_ns: int,
    groups: tuple[int, ...],
) -> Layer:
    """A unit whose messages last about `link` times its compute.

    A quarter of them reshard to one of the smaller groups, whose link may be faster.
    """
    compute = draw.randint(200 * US, 4 * MS)
    depth, behind = draw.choice([0, 0, 1, 2, 3]), draw.choice([None, 1, 2, 3]) if unit else None
    group = draw.choice(groups) if draw.random() < 0.25 else None
    smaller = {
        "gather_backward_ns": round(compute * link * draw.uniform(0.1, 1)),
        "copy_in_backward_ns": draw.randint(0, 400 * US),
        "reshard_ns": draw.randint(0, 400 * US),
    }
    work = UnitWork(
        **(smaller if group else {}),
        gather_ns=round(compute * link * draw.uniform(0.5, 1.5)),
        reduce_ns=round(compute * link * draw.uniform(0.5, 1.5)),
        all_reduce_ns=round(compute * link * draw.uniform(0.1, 0.5)),
        copy_in_ns=draw.randint(0, 200 * US),
        reduce_copy_in_ns=draw.randint(0, 200 * US),
        gather_launch_ns=draw.randint(0, 200 * US),
        reduce_launch_ns=draw.randint(0, 100 * US),
    )
    policy = UnitPolicy(
        reshard_after_forward=group is not None or draw.random() < 0.7,
        smaller_group=group,
        forward_prefetch=tuple(range(unit + 1, min(num_layers, unit + depth) + 1)),
        backward_prefetch=None
        if behind is None
        else tuple(range(unit - 1, max(0, unit - behind - 1), -1)),
    )
    return Layer(compute, 2 * compute, work, policy, launch_ns=host_ns)


def _exposed_of(spans: Spans) -> dict[str, int]:
    """By unit, the time of its collectives in which nothing computes, ns."""
    listed = list(spans)
    compute = _intervals(span for span in listed if span[0] in _COMPUTE)
    labels = {kind.label for kind in _COLLECTIVES}
    moved: dict[str, list[tuple[str, str, int, int]]] = {}
    for span in listed:
        if span[0] in labels:
            moved.setdefault(span[1], []).append(span)
    return {unit: _intervals(own).subtract(compute).duration_ns for unit, own in moved.items()}


def _intervals(spans: Spans) -> Intervals:
    times = [(start, end) for _, _, start, end in spans]
    return Intervals.of([start for start, _ in times], [end for _, end in times])


class _LaunchingDevice(VirtualDevice):
    """A device whose kernels start when the host begins to issue them, as in [Note: launching]."""

    _launch_ns = 0

    def spend(self, duration_ns: int) -> None:
        self._launch_ns = duration_ns

    def run(self, kind: str, unit: str, duration_ns: int) -> None:
        start = max(self.current.free_ns, self.now_ns)
        self.now_ns += self._launch_ns
        self._launch_ns = 0
        self.current.free_ns = max(start + duration_ns, self.now_ns)
        self._note(kind, unit, start, self.current.free_ns)


def _replay(speed: dict[str, float], changes: Changes | None = None) -> Replay:
    """Record torch's code with the changes."""
    prepare = None if changes is None else partial(_prepare, changes=changes)
    with patch.object(virtual_training, "VirtualDevice", _LaunchingDevice):
        return Replay(**speed, prepare=prepare)


def _prepare(model: Any, changes: Changes) -> None:
    """Apply the changes to torch's model."""
    layers, depth = list(model.layers), changes.forward_prefetch or 0
    order = [model, *layers]
    for at, module in enumerate(order):
        module.set_modules_to_forward_prefetch(order[at + 1 : at + 1 + depth])
    if changes.reshard_after_forward is False:
        for layer in layers:
            layer.set_reshard_after_forward(False)


def _exposed_by_unit(replay: Replay) -> dict[str, int]:
    """The exposed time of the last step according to the analyses, ns."""
    events = replay.events.where(replay.events.step == replay.events.step.max())
    rows = collective_rows(reduce_rank(events, rank=0))
    return {
        name: int(rows.exposed_ns[rows.unit == index].sum())
        for index, name in enumerate(replay.units)
    }
