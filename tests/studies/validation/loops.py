"""Compare predictions with runs of the loops and models that public projects train.

Each loop of `loop_script` is recorded under one plan. Four changes of that plan are predicted and
then run: other units, one unit, prefetch, no reshard. Eight ranks are emulated; tensor parallelism
runs on four gloo ranks, because emulated ranks have no tensor-parallel peers.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from fsdp_inspect.errors import PlanError
from fsdp_inspect.simulation.changes import Changes, apply_changes
from fsdp_inspect.simulation.recorded import observed_plan
from fsdp_inspect.simulation.scenario import resolve_plan, shapes_of
from fsdp_inspect.store.reader import StoredRun
from fsdp_inspect.trace.plan import Plan
from tests.studies.validation.loop_script import LOOPS
from tests.studies.validation.outcomes import Outcome, compare, only_run, predict, work_of

CHANGES: dict[str, Changes] = {
    "wrap=every:2": Changes(wrap="every:2"),
    "wrap=root": Changes(wrap="root"),
    "forward-prefetch=2": Changes(forward_prefetch=2),
    "reshard-after-forward=false": Changes(reshard_after_forward=False),
}
LOOP_STEPS = 24
ON_GLOO_RANKS = ("tensor_parallel",)
_SCRIPT = Path(__file__).with_name("loop_script.py")
_EMULATION = ("fsdp_inspect.emulate", "--world-size=8", "--bandwidth=300MB/s", "--latency=200us")
_LATE = ("fsdp_inspect.emulate", "--world-size=8", "--bandwidth=1GB/s", "--latency=5ms")
_THREAD_TIME = ("tests.studies.validation.virtual_time", "--thread-time")
_LAUNCHES = {"small_blocks": (*_THREAD_TIME, *_LATE)}
"""The launch of loops that need another one: a wait for a core is as long as a small block."""
_FOUR_RANKS = ("torch.distributed.run", "--nproc-per-node=4", "--local-addr=127.0.0.1")


def judge_loops(
    folder: Path, loops: list[str], steps: int, say: Callable[[str], None]
) -> list[Outcome]:
    """Record each loop, then predict and run each change; the recorded plan runs before each."""
    return [outcome for loop in loops for outcome in _judge_loop(folder / loop, loop, steps, say)]


def _judge_loop(
    folder: Path, loop: str, steps: int, say: Callable[[str], None]
) -> Iterator[Outcome]:
    baseline = only_run(_run(folder / "baseline", loop, steps))
    for number, (name, changes) in enumerate(CHANGES.items()):
        plan_file = folder / f"{number}.toml"
        plan = _changed(baseline, changes)
        plan.dump(plan_file)
        try:
            simulation = predict(baseline, plan, {})
        except PlanError as error:  # for example one unit, with a loss that calls the head alone
            say(f"{loop}: {name} cannot run: {error}")
            continue
        beside = work_of(_run(folder / f"{number}-beside", loop, steps))
        actual = work_of(_run(folder / f"{number}", loop, steps, plan_file))
        outcome = compare(f"{loop}: {name}", simulation, actual, beside)
        say(f"{outcome.name}: {outcome.step_error:+.1%} (A/A {outcome.same_error:+.1%})")
        yield outcome


def _changed(baseline: StoredRun, changes: Changes) -> Plan:
    recorded = resolve_plan(observed_plan(baseline), baseline.manifest)
    return apply_changes(recorded, changes, shapes_of(baseline.manifest))


def _run(folder: Path, loop: str, steps: int, plan_file: Path | None = None) -> Path:
    """Train and record; returns the folder of the run.

    Raises:
        RuntimeError: The script failed.
    """
    launch = _LAUNCHES.get(loop, _EMULATION)
    if loop in ON_GLOO_RANKS:
        launch = (*_FOUR_RANKS, "-m", "fsdp_inspect.record")
    command = [sys.executable, "-m", *launch, f"--out={folder}", "--no-verdict", str(_SCRIPT)]
    command += [loop, f"--steps={steps}", *([f"--plan={plan_file}"] if plan_file else [])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{loop} failed: {done.stderr[-2000:]}")
    return folder


def all_loops() -> list[str]:
    """The names of all loops."""
    return list(LOOPS)
