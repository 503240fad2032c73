"""Predict settings of FSDP1 with the schedule of FSDP2, on virtual streams.

    python -m tests.studies.validation.fsdp1_schedule

Torch's FSDP1 runs on a virtual device, with the recorder. The product refuses to simulate FSDP1;
this study skips the refusal. It prints a Markdown table: the error of the recorded step simulated
again, and of other settings predicted from it. Blocks are unequal, so that exposed time moves.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_inspect.simulation import recorded
from fsdp_inspect.simulation.changes import Changes, apply_changes
from fsdp_inspect.simulation.simulate import simulate_plan
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.plan import Plan, UnitPlan
from fsdp_inspect.trace.sharders import FSDP1
from tests.builders import InMemoryRun, RunBuilder
from tests.recording.test_fsdp1_cuda_path import fsdp1_on
from tests.recording.virtual_device import MS, TimedBlock, TimedModel, VirtualDevice
from tests.recording.virtual_wrapped import Recorded

SPEEDS = ((1, 1, 0.1), (3, 3, 0.1), (6, 6, 0.1), (2, 9, 0.1), (9, 2, 0.1), (3, 3, 6))
"""Duration of an all-gather, of a reduce-scatter, and of the host's work for a block, ms."""
GRAD_OP = {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
SETTINGS: dict[str, tuple[Changes, dict[str, Any]]] = {
    "SHARD_GRAD_OP": (Changes(reshard_after_forward=False), GRAD_OP),
    "SHARD_GRAD_OP, simulated without waits for reductions in backward": (
        Changes(reshard_after_forward=False, reduce_scatter_buffers=1000),
        GRAD_OP,
    ),
    "forward_prefetch": (Changes(forward_prefetch=1), {"forward_prefetch": True}),
}


def train(gather: float, scatter: float, host: float, **options: Any) -> InMemoryRun:
    """Record FSDP1 on a virtual device."""
    device = VirtualDevice()
    with fsdp1_on(device, gather_ns=int(gather * MS), scatter_ns=int(scatter * MS)):
        model = TimedModel(device, blocks=6, forward_ns=MS, host_ns=int(host * MS))
        for at, layer in enumerate(model.layers):
            layer.forward_ns = MS if at % 3 == 0 else 6 * MS
        own = {"device_id": torch.device("cpu"), "use_orig_params": True, **options}
        policy = ModuleWrapPolicy({TimedBlock})
        found = Recorded(device, FullyShardedDataParallel(model, auto_wrap_policy=policy, **own))
    plan = Plan(units=tuple(UnitPlan(modules=(name,)) for name in found.units))
    builder = RunBuilder(
        found.units, plan=plan.to_dict(), device_type="cuda", warmup_steps=0, sharder=FSDP1
    )
    builder.rank(0).step(0, 0, 1)
    return replace(builder.build(), event_tables={0: found.events})


def step_ns(run: InMemoryRun) -> int:
    """The duration of the recorded step."""
    steps = run.events(0, kinds=[EventKind.STEP])
    return int((steps.end_ns - steps.start_ns)[-1])


def main() -> None:
    """Print the table."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    print("| all-gather, reduce-scatter, host | recorded step | " + " | ".join(SETTINGS) + " |")
    print("|---|--:|" + "--:|" * len(SETTINGS))
    for gather, scatter, host in SPEEDS:
        run = train(gather, scatter, host)
        work = recorded.measure_work(run)
        errors = [work.simulate().duration_ns / work.step_time_ns - 1]
        for changes, options in SETTINGS.values():
            truth = step_ns(train(gather, scatter, host, **options))
            plan = apply_changes(Plan.from_dict(run.manifest.plan), changes)
            errors.append(simulate_plan(run, plan).predicted.step_time_ns / truth - 1)
        print(f"| {gather}, {scatter}, {host} ms | " + " | ".join(f"{e:+.1%}" for e in errors), "|")
    dist.destroy_process_group()


if __name__ == "__main__":
    with patch.object(recorded, "expect_simulated_sharder", lambda manifest: None):
        main()
