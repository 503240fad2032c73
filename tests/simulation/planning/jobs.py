"""Jobs and machines for tests of capacity plans."""

from dataclasses import replace

from fsdp_inspect.simulation.planning.candidates import Candidate, Job
from fsdp_inspect.simulation.planning.machines import PlannedMachine, make_machine
from fsdp_inspect.simulation.planning.transformer import load_model
from fsdp_inspect.simulation.planning.workload import build_workload
from fsdp_inspect.simulation.recorded import Execution, simulate_step


def make_job(preset: str, *, num_layers: int | None = None, **values: int) -> Job:
    """A job on the trainer's preset; `gpus`, `gpus_per_node` and `seq_len` have small defaults."""
    model, _ = load_model(preset)
    if num_layers is not None:
        model = replace(model, num_layers=num_layers)
    sizes = {"gpus": 8, "gpus_per_node": 8, "seq_len": 1024, **values}
    return Job(model=model, tokens=1e9, **sizes)


def peak_of_formula(job: Job, candidate: Candidate, preset: str = "h200-ib400") -> int:
    """The peak of the closed formulas and the simulated step, bytes."""
    machine: PlannedMachine = make_machine(preset, gpus_per_node=job.gpus_per_node)
    peak = simulate_step(build_workload(job, candidate, machine.speed), Execution.STREAM).peak_bytes
    assert peak is not None
    return peak
