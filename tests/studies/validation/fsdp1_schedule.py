"""Predict settings of FSDP1 from one recorded setting, on virtual streams.

    python -m tests.studies.validation.fsdp1_schedule

Torch's FSDP1 runs on a virtual device, where all times are known, with the recorder. The study
prints a Markdown table: the error of the recorded step simulated again, and of the steps predicted
from it. Blocks are unequal, so that exposed time moves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, wraps
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_inspect.simulation.changes import Changes, apply_changes
from fsdp_inspect.simulation.recorded import observed_plan
from fsdp_inspect.simulation.simulate import simulate_plan
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.sharders import FSDP1
from tests.builders import InMemoryRun, RunBuilder
from tests.recording.test_fsdp1_cuda_path import fsdp1_on
from tests.recording.virtual_device import MS, TimedBlock, TimedModel, VirtualDevice
from tests.recording.virtual_wrapped import Recorded

WORLD_SIZE = 4
SPEEDS = ((1, 1, 0.1), (3, 3, 0.1), (6, 6, 0.1), (2, 9, 0.1), (9, 2, 0.1), (3, 3, 6))
"""Duration of an all-gather, of a reduce-scatter, and of the host's work for a block, ms."""
SETTINGS: Mapping[str, tuple[Changes, dict[str, Any]]] = {
    "as recorded": (Changes(), {}),
    "`SHARD_GRAD_OP`": (
        Changes(reshard_after_forward=False),
        {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    ),
    "`forward_prefetch`": (Changes(forward_prefetch=1), {"forward_prefetch": True}),
    "`BACKWARD_POST`": (
        Changes(backward_prefetch="BACKWARD_POST"),
        {"backward_prefetch": BackwardPrefetch.BACKWARD_POST},
    ),
    "no backward prefetch": (Changes(backward_prefetch="none"), {"backward_prefetch": None}),
    "no limit": (Changes(limit_all_gathers=False), {"limit_all_gathers": False}),
    "`no_sync`": (Changes(accumulation_sync="last"), {"no_sync": True}),
    "`HYBRID_SHARD`": (Changes(), {"sharding_strategy": ShardingStrategy.HYBRID_SHARD}),
    "bfloat16": (
        Changes(param_dtype="bfloat16", reduce_dtype="float32"),
        {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32)},
    ),
    "one unit": (Changes(wrap="root"), {"auto_wrap_policy": None}),
    "`SHARD_GRAD_OP`, `forward_prefetch`": (
        Changes(reshard_after_forward=False, forward_prefetch=1),
        {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "forward_prefetch": True},
    ),
    "both prefetches, no limit": (
        Changes(forward_prefetch=1, backward_prefetch="BACKWARD_POST", limit_all_gathers=False),
        {
            "forward_prefetch": True,
            "backward_prefetch": BackwardPrefetch.BACKWARD_POST,
            "limit_all_gathers": False,
        },
    ),
}
"""The change of the plan, and the arguments of FSDP1 that make it."""


class ManyKernels(VirtualDevice):
    """A device on which the work of a block is many kernels: they run while the host issues more.

    The simulation assumes the same ([Note: launching] in `simulation.machine`).
    """

    begun_ns = replicas_free_ns = 0

    def spend(self, duration_ns: int) -> None:
        self.begun_ns = self.now_ns
        super().spend(duration_ns)

    def run(self, kind: str, unit: str, duration_ns: int) -> None:
        stream = self.current
        start = max(stream.free_ns, self.begun_ns)
        stream.free_ns = max(start + duration_ns, self.now_ns)
        self._note(kind, unit, start, stream.free_ns)

    def timed(self, all_reduce: Callable[..., Any]) -> Callable[..., Any]:
        """An all-reduce over the replicas, on their own communicator."""

        @wraps(all_reduce)  # the recorder reads its signature
        def run(*args: Any, **kwargs: Any) -> Any:
            _, self.replicas_free_ns = self.current.run(2 * MS, self.replicas_free_ns)
            return all_reduce(*args, **kwargs)

        return run


@cache
def train(speed: tuple[float, float, float], name: str, microbatches: int = 1) -> InMemoryRun:
    """Record FSDP1 with a setting on a virtual device."""
    gather, scatter, host = (round(ms * MS) for ms in speed)
    device = ManyKernels()
    own = {"device_id": torch.device("cpu"), "use_orig_params": True}
    own |= {"auto_wrap_policy": ModuleWrapPolicy({TimedBlock}), **SETTINGS[name][1]}
    if "HYBRID" in name:
        own["device_mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    skips = own.pop("no_sync", False)
    with (
        fsdp1_on(device, gather_ns=gather, scatter_ns=scatter),
        patch.object(dist, "all_reduce", device.timed(dist.all_reduce)),
    ):
        model = TimedModel(device, blocks=6, forward_ns=MS, host_ns=host)
        for at, layer in enumerate(model.layers):
            layer.forward_ns = MS if at % 3 == 0 else 6 * MS
        wrapped = FullyShardedDataParallel(model, **own)
        found = Recorded(device, wrapped, microbatches=microbatches, skips_reduction=skips)
        plan = found.sharder.observe_plan(wrapped)
    assert plan is not None
    builder = RunBuilder(
        found.units,
        world_size=WORLD_SIZE,
        plan=plan.to_dict(),
        device_type="cuda",
        warmup_steps=0,
        sharder=FSDP1,
        process_groups=found.groups.describe(),
    )
    builder.rank(0).step(0, 0, 1)
    run = builder.build()
    units = found.sharder.describe_units(found.groups)
    manifest = run.manifest.model_copy(update={"units": units})
    return replace(run, manifest=manifest, event_tables={0: found.events})


def step_ns(run: InMemoryRun) -> int:
    """The duration of the recorded step."""
    steps = run.events(0, kinds=[EventKind.STEP])
    return int((steps.end_ns - steps.start_ns)[-1])


def predict(run: InMemoryRun, changes: Changes) -> int:
    """The predicted step time."""
    plan = apply_changes(observed_plan(run), changes)
    return simulate_plan(run, plan).predicted.step_time_ns


def predict_setting(speed: tuple[float, float, float], name: str) -> tuple[int, int]:
    """The predicted and the recorded step time of a setting, ns.

    The prediction starts from the default settings, or from the setting itself if no change of a
    plan makes it.
    """
    changes = SETTINGS[name][0]
    count = 2 if changes.accumulation_sync else 1
    start = "as recorded" if changes != Changes() else name
    return predict(train(speed, start, count), changes), step_ns(train(speed, name, count))


def main() -> None:
    """Print the table."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    print("| all-gather, reduce-scatter, host | " + " | ".join(SETTINGS) + " |")
    print("|---|" + "--:|" * len(SETTINGS))
    for speed in SPEEDS:
        errors = []
        for name in SETTINGS:
            predicted, truth = predict_setting(speed, name)
            errors.append(predicted / truth - 1)
        times = ", ".join(f"{ms:g}" for ms in speed)
        print(f"| {times} ms | " + " | ".join(f"{e:+.1%}" for e in errors), "|")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
