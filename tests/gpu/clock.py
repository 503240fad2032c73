"""Check recorded times against the host's clock over 200 steps that share one hardware queue.

`CUDA_DEVICE_MAX_CONNECTIONS=1`, which Megatron and others set, puts all streams into one queue. The
recorder's own stream is then no longer idle. Its events are queued behind the kernels of the
training, and their times may be late. In a few steps the device is synchronised before the step
ends. The recorded end of such a step must lie between two readings of the host's clock around it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.codes import EventKind
from tests.gpu.outcome import Row
from tests.gpu.setting import (
    ONE_NODE,
    Setting,
    emulated_training,
    expect_healthy,
    make_recorder,
    synchronize,
)
from tests.studies.benchmarks.figures import Figure

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_STEPS = 200
_CHECKED_EVERY = 50
"""The other steps run without a pause, so that the queue is never empty between them."""
_SMALL = {"preset": "tiny", "num_layers": 4, "seq_len": 64, "batch_size": 2}
_BESIDE_NS = 50_000
"""The tolerance in addition to the recorder's own uncertainty."""

Bounds = dict[int, tuple[int, int]]
"""The host's clock before and after the end of each step, ns, by step."""


def measure(setting: Setting) -> Iterator[Row]:
    """One row: the distance of the recorded ends of steps from their bounds."""
    os.environ[CONNECTIONS] = "1"  # read when CUDA starts; this process has not started it yet
    bounds: Bounds = {}
    num_steps, every = (8, 4) if setting.quick else (_STEPS, _CHECKED_EVERY)
    with (
        emulated_training(setting, ONE_NODE, **_SMALL) as workload,
        make_recorder(workload, setting.scratch / "run") as recorder,
    ):
        loop = workload.loop(recorder)
        for step in range(num_steps):
            is_checked = (step + 1) % every == 0
            with recorder.step():
                loop.train_step(step)
                if is_checked:
                    synchronize(setting)
                    before = time.perf_counter_ns()
            if is_checked:
                synchronize(setting)
                bounds[step] = before, time.perf_counter_ns()
        expect_healthy(recorder)
    run = open_run(setting.scratch / "run")
    steps = run.events(0, kinds=[EventKind.STEP])
    ends = dict(zip(steps.step.tolist(), steps.end_ns.tolist(), strict=True))
    yield clock_row(setting, ends, bounds, run.ranks[0].clock_uncertainty_ns)


def clock_row(setting: Setting, ends: dict[int, int], bounds: Bounds, uncertainty_ns: int) -> Row:
    """The row for the recorded ends of steps.

    Args:
        setting: The setting of the recording.
        ends: The recorded end of each step, ns on the host's clock.
        bounds: The bounds of the end of each step.
        uncertainty_ns: The uncertainty of the recorder's clock according to the run.
    """
    outside = [
        max(before - ends[step], ends[step] - after, 0) for step, (before, after) in bounds.items()
    ]
    widest = max(after - before for before, after in bounds.values())
    allowed = uncertainty_ns + _BESIDE_NS
    return setting.judge.aimed(
        Figure(
            name="error of device times on the host's clock",
            value=f"{max(outside) / 1e3:.1f} µs at most",
            aim=f"<= {allowed / 1e3:.0f} µs",
            how=(
                f"Measured: {len(ends)} steps on {setting.place} with {CONNECTIONS}=1; how far the "
                f"recorded end of a step lies outside of two readings of the host's clock, at "
                f"{len(bounds)} steps that end with a synchronised device (at most "
                f"{widest / 1e3:.1f} µs apart). Allowed: the uncertainty that the run states, "
                f"{uncertainty_ns / 1e3:.1f} µs, and {_BESIDE_NS / 1e3:.0f} µs."
            ),
            numbers={"highest_ns": max(outside), "uncertainty_ns": uncertainty_ns},
        ),
        holds=max(outside) <= allowed,
    )
