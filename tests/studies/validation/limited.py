"""Compare predictions with runs of two ranks over a network that the kernel limits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fsdp_inspect.simulation.recorded import observed_plan
from tests.distributed.limited_network import LimitedNetwork, limited_network
from tests.studies.validation.grid import SPLIT
from tests.studies.validation.outcomes import Outcome, compare, only_run, predict, work_of

RATE_MBIT = 200
STEPS = 14
PLANS: tuple[dict[str, str], ...] = (
    {"wrap": "every:2"},
    {"wrap": "every:4"},
    {"wrap": "split"},
    {"wrap": "root"},
    {"reshard-after-forward": "false"},
    {"wrap": "every:2", "reshard-after-forward": "false"},
    {"unshard-async-op": "true", "forward-prefetch": "1"},
)
"""gloo blocks the main thread, so prefetch alone hides nothing, only with asynchronous gathers."""


def judge_limited(folder: Path, say: Callable[[str], None]) -> list[Outcome]:
    """Judge each plan from one recorded run; the recorded plan runs again before each.

    Raises:
        subprocess.CalledProcessError: The machine does not support such a network.
    """
    outcomes = []
    with limited_network(RATE_MBIT) as network:
        baseline = only_run(_run(network, folder / "baseline", {}))
        for number, settings in enumerate(PLANS):
            beside = work_of(_run(network, folder / f"{number}-beside", {}))
            actual = only_run(_run(network, folder / f"{number}", settings))
            # `simulate` has no change for asynchronous gathers, so the plan is that of the run.
            simulation = predict(baseline, observed_plan(actual), {})
            words = " ".join(f"{name}={value}" for name, value in settings.items())
            outcome = compare(words, simulation, work_of(folder / f"{number}"), beside)
            say(f"{words}: {outcome.step_error:+.1%} (A/A {outcome.same_error:+.1%})")
            outcomes.append(outcome)
    return outcomes


def _run(network: LimitedNetwork, folder: Path, settings: dict[str, str]) -> Path:
    chosen = {**settings, **({"wrap": SPLIT} if settings.get("wrap") == "split" else {})}
    options = [f"--{name}={value}" for name, value in chosen.items()]
    network.run(
        "-m",
        "instrumented_trainer",
        "--preset=tiny",
        f"--steps={STEPS}",
        f"--runs-dir={folder}",
        *options,
    )
    return folder
