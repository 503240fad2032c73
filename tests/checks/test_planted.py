"""Is each planted regression found, with the right unit, phase and category, and nothing else?

The table is the specification: what is planted, and what must be blamed.
"""

from pathlib import Path

import pytest

from fsdp_inspect import forecast_memory, open_run
from fsdp_inspect.checks.baseline import Baseline, make_baseline
from fsdp_inspect.checks.judge import CheckResult, Outcome, check
from fsdp_inspect.checks.reading import read_runs
from fsdp_inspect.report.check import describe_outcome, render_markdown
from tests.checks.planted import build

BLOCK = 2 * 128 * 512  # parameters
KIB = 1024

# plant: metric that fails first, phase, [(category, units, bytes more)], words of the cause
REGRESSIONS = {
    "not resharded": (
        "peak_allocated_bytes",
        "backward",
        [("unsharded_parameter", ("layers.2",), 2 * BLOCK)],
        "`layers.2` now reshard_after_forward=False: +1 unsharded block (256.0 KiB)",
    ),
    "kept activation": (
        "peak_allocated_bytes",
        "backward",
        [("activation", ("layers.3",), 64 * KIB)],
        "something keeps activations of layers.3",
    ),
    "fp32 reduce": (
        "peak_allocated_bytes",
        "backward",
        [("reduce_scatter_buffer", ("layers.5",), 2 * BLOCK)],
        "now reduce_dtype=float32 instead of bfloat16",
    ),
    "leak": (
        "peak_allocated_bytes",
        "backward",
        [("activation", ("layers.3",), 64 * KIB)],
        "something keeps activations of layers.3",
    ),
    "optimizer state": (
        "peak_allocated_bytes",
        "backward",
        [
            (
                "optimizer_state",
                ("(root)", "embedding", *(f"layers.{block}" for block in range(6))),
                896 * KIB + 14 * 4,  # and Adam's step count of each of 14 tensors
            )
        ],
        "the optimizer keeps 2 times as much",
    ),
    "root swallows": (
        "peak_allocated_bytes",
        "backward",
        [("unsharded_parameter", ("(root)",), 128 * KIB)],
        "`embedding` is no unit any more; `(root)` holds their parameters",
    ),
    "gather in flight": (
        "peak_allocated_bytes",
        "backward",
        [("all_gather_buffer", ("layers.2",), 2 * BLOCK)],
        "forward_prefetch",
    ),
}
HARMLESS = ("nothing", "renamed", "reordered", "other seed")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CheckResult]:
    folder = tmp_path_factory.mktemp("planted")
    baseline: Baseline | None = None
    found = {}
    for plant in (*HARMLESS, *REGRESSIONS):
        path = folder / plant.replace(" ", "-")
        forecast_memory(build, path, world_size=4, settings={"plant": plant})
        reading = read_runs([open_run(path)])
        baseline = baseline or make_baseline(reading)
        found[plant] = check(reading, baseline)
    return found


@pytest.mark.parametrize("plant", REGRESSIONS)
def test_a_planted_regression_is_found_and_nothing_else_is_blamed(
    results: dict[str, CheckResult], plant: str
) -> None:
    metric, phase, grown, cause = REGRESSIONS[plant]
    result = results[plant]

    failed = [one.name for one in result.metrics if one.outcome is Outcome.REGRESSION]
    assert result.exit_code == 1
    assert failed[0] == metric
    assert result.phase == phase
    assert [(one.category, one.units, one.bytes) for one in result.growth] == grown
    assert any(cause in words for words in result.causes), result.causes


def test_a_leak_is_seen_in_what_the_step_leaves(results: dict[str, CheckResult]) -> None:
    failed = {
        plant: "resting_bytes" in [m.name for m in result.metrics if m.outcome != "holds"]
        for plant, result in results.items()
    }
    assert [plant for plant, is_failed in failed.items() if is_failed] == [
        "leak",
        "optimizer state",
    ]


@pytest.mark.parametrize("plant", HARMLESS)
def test_a_harmless_change_passes(results: dict[str, CheckResult], plant: str) -> None:
    result = results[plant]

    assert result.exit_code == 0, describe_outcome(result)
    assert result.growth == ()
    assert result.causes == ()


def test_the_message_says_by_how_much_where_and_why(results: dict[str, CheckResult]) -> None:
    sentence = describe_outcome(results["kept activation"])

    assert "peak_allocated_bytes rose by 64.0 KiB" in sentence
    assert "at the peak of backward" in sentence
    assert "activation of layers.3 +64.0 KiB" in sentence
    assert "Likely cause" in render_markdown([results["kept activation"]])


def test_two_baselines_of_the_same_are_alike(tmp_path: Path) -> None:
    readings = []
    for name in ("first", "second"):
        forecast_memory(build, tmp_path / name, world_size=4)
        readings.append(make_baseline(read_runs([open_run(tmp_path / name)])))

    first, second = readings
    assert first == second
