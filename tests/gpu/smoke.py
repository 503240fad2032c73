"""Record the trainer with the command line as a user does, and read the run: the first step."""

from __future__ import annotations

from collections.abc import Iterator

from fsdp_inspect.formatting import format_ns
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.run import RunStatus
from tests.gpu.outcome import Row
from tests.gpu.sample import run_python
from tests.gpu.setting import ONE_NODE, Setting
from tests.studies.benchmarks.figures import Figure

_STEPS = 12
_MODEL = ("--preset", "tiny", "--num-layers", "4")


def measure(setting: Setting) -> Iterator[Row]:
    """One row: whether the run is complete, on the expected device and clock."""
    setting.kept.mkdir()
    command = ["-m", "instrumented_trainer", "--emulate", ONE_NODE, *_MODEL]
    print(run_python([*command, "--steps", str(_STEPS), "--runs-dir", str(setting.kept)]))
    [folder] = (path.parent for path in setting.kept.glob("*/run.json"))
    for part in ("summary", "diagnose"):
        print(run_python(["-m", "fsdp_inspect", part, str(folder)]))
    run = open_run(folder)
    [record] = run.ranks
    clock = "cuda_event" if setting.is_cuda else "host"
    is_sound = (
        run.status is RunStatus.COMPLETE
        and record.clock == clock
        and record.device.startswith(setting.device)
    )
    yield setting.judge.exact(
        Figure(
            name="a run of the trainer",
            value=f"{run.status.value}, {record.num_steps} steps, {record.device}, {record.clock}",
            aim=f"complete, {_STEPS} steps, {setting.device}, {clock}",
            how=(
                f"Recorded with: python {' '.join(command)}; then `summary` and `diagnose` of "
                f"the run. The clock is known to {format_ns(record.clock_uncertainty_ns)}. "
                f"Notes of the run: {list(run.notes) or 'none'}."
            ),
        ),
        holds=is_sound and record.num_steps == _STEPS,
    )
