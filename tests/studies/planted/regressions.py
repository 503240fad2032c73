"""Check every planted regression against one baseline, and define the expected result.

`EXPECTED` is the specification. A cause of None means that no recorded setting shows the change, so
the check must state no cause, only the increase.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fsdp_inspect import forecast_memory
from fsdp_inspect.comparison.gate.baseline import Baseline, make_baseline
from fsdp_inspect.comparison.gate.check import CheckResult, check_run
from fsdp_inspect.comparison.gate.measurements import GateMeasurements, read_runs
from fsdp_inspect.store.reader import open_run
from tests.studies.planted.training import OFFLOADED, PLANTS, build, folder_of

WORLD_SIZE = 4
"""Ranks of a forecast."""
RECORDED, FORECAST = "recorded", "forecast"


@dataclass(frozen=True)
class Expected:
    """The expected result of a check of a plant."""

    cause: str | None
    """The words of the only stated cause."""
    grew: tuple[str, str] | None
    """Category and unit of an increase that must be listed; None: the check passes."""
    passes: tuple[str, ...] = ()
    """The kinds, `recorded` or `forecast`, in which nothing exceeds its limit."""
    other: tuple[str, str] | None = None
    """Category and unit of a second increase, whose cause must be unknown."""
    other_cause: str | None = None
    """The words of the only cause that other metrics may state."""
    also_grew: tuple[str, str] | None = None
    """Category and unit of a second increase next to `grew`."""


_KEPT = ("activation", "layers.0")
_COPY = ("temporary", "(no unit)")
"""A copy that the step made, after the step."""
_EARLIER = ("input", "(no unit)")
"""The copy of the step before, at the peak. No setting raises it, so a setting next to it is named
only if it explains the rest and at least 80% of all."""
EXPECTED: dict[str, Expected] = {
    "nothing": Expected(None, None, (RECORDED, FORECAST)),
    "no reshard after forward": Expected(
        "reshard_after_forward=False", ("unsharded_parameter", "layers.0")
    ),
    "a block left unwrapped": Expected(
        "`layers.1` is not a unit", ("unsharded_parameter", "(root)")
    ),
    "reduction in float32": Expected("reduce_dtype=float32", ("reduce_scatter_buffer", "layers.3")),
    # On 2 ranks, full gradients in bfloat16 are as large as a shard in float32.
    "no_sync": Expected(
        "gradient_sync is some microbatches", ("unsharded_gradient", "layers.0"), (RECORDED,)
    ),
    "deeper prefetch": Expected(
        "backward_prefetch gathers 2 units ahead", ("all_gather_buffer", "layers.0")
    ),
    "dropout": Expected("dropout is 0.1 in 4 modules", ("activation", "layers.1")),
    "eager attention": Expected("attention is eager instead of sdpa", ("activation", "layers.1")),
    "eager attention without a setting": Expected(None, ("activation", "layers.1")),
    "checkpointing off in one block": Expected(
        "`layers.2` is not checkpointed", ("activation", "layers.2")
    ),
    "checkpointing off in all blocks": Expected(
        "`layers.0, layers.2` are not checkpointed", ("activation", "layers.0")
    ),
    "amsgrad": Expected("optimizer is AdamW with amsgrad=True", ("optimizer_state", "layers.0")),
    "parameters in float32": Expected("param_dtype=float32", ("activation", "layers.1")),
    "gradients kept across steps": Expected(None, ("sharded_gradient", "layers.0")),
    "a retained graph": Expected(None, ("activation", "layers.1")),
    "a list that keeps activations": Expected(None, _KEPT),
    "a bigger MLP": Expected("the model has 327,680 parameters", ("optimizer_state", "layers.0")),
    "a second embedding": Expected(
        "the model has 294,912 parameters", ("optimizer_state", "(root)")
    ),
    "a longer sequence": Expected("seq_len is 40 instead of 32", ("activation", "layers.1")),
    "a bigger batch": Expected("batch_size is 5 instead of 4", ("activation", "layers.1")),
    "a bigger batch without a setting": Expected(
        "the batch grew: the model receives 5 x 32 int64 instead of 4 x 32 int64",
        ("activation", "layers.1"),
    ),
    "logits in float32": Expected("loss_dtype is float32", ("activation", "(no unit)")),
    "a buffer on one block": Expected(None, ("buffer", "layers.1")),
    "a second copy of the optimizer state": Expected(None, _EARLIER, other=_COPY),
    "a kept scalar": Expected(None, ("activation", "(no unit)"), (RECORDED,)),
    "offload turned off": Expected("offload of all 5 units is none", ("optimizer_state", "(root)")),
    "activations kept, another learning rate": Expected(None, _KEPT),
    "activations kept, a shorter sequence": Expected(None, _KEPT),
    "activations kept, a norm added": Expected(None, _KEPT),
    "activations kept, more checkpointing": Expected(None, _KEPT),
    "activations kept, deeper prefetch": Expected(None, _KEPT),
    "activations kept, reduction in float32": Expected(None, _KEPT),
    "activations kept, no reshard after forward": Expected(None, _KEPT),
    "activations kept, a longer sequence": Expected(None, _KEPT),
    "state kept, another setting of the optimizer": Expected(None, _EARLIER, other=_COPY),
    "state kept, logits in float32": Expected(
        None, ("activation", "(no unit)"), other=_COPY, also_grew=_EARLIER
    ),
    "state kept, a norm added": Expected(None, _EARLIER, other=_COPY),
    "a bigger batch without a setting, a norm added": Expected(
        "the batch grew", ("activation", "layers.1"), other_cause="the model has 262,656 parameters"
    ),
}


@dataclass(frozen=True)
class Outcome:
    """The result of one plant's check."""

    plant: str
    kind: str
    """`recorded` or `forecast`."""
    result: CheckResult

    def problems(self) -> Iterator[str]:
        """The differences between the check's result and the expected one."""
        expected, result = EXPECTED[self.plant], self.result
        if self.kind in expected.passes:
            if result.exit_code != 0 or result.causes or result.others:
                yield f"exit code {result.exit_code}, causes {result.causes}. Expected a pass"
            return
        if result.exit_code != 1:
            yield f"exit code {result.exit_code}. Expected 1"
        causes = result.causes
        is_right = (
            not causes
            if expected.cause is None
            else len(causes) == 1 and expected.cause in causes[0]
        )
        if not is_right:
            yield f"the stated causes are {causes}. Expected {expected.cause or 'none'}"
        grew = {(one.category, unit) for one in result.growth for unit in one.units}
        for each in (expected.grew, expected.also_grew or expected.grew):
            if each not in grew:
                yield f"{each} is not in what grew: {sorted(grew)}"
        yield from self._problems_of_others()

    def _problems_of_others(self) -> Iterator[str]:
        other = EXPECTED[self.plant].other
        expected_other = EXPECTED[self.plant].other_cause or "none"
        found = {
            (one.category, unit): each
            for each in self.result.others
            for one in each.growth
            for unit in one.units
        }
        if other is not None and other not in found:
            yield f"{other} is not in what grew elsewhere: {sorted(found)}"
        yield from (
            f"the stated causes of {one.metric} are {one.causes}. Expected {expected_other}"
            for one in self.result.others
            if any(expected_other not in cause for cause in one.causes)
        )


def forecast_all(folder: Path) -> None:
    """Forecast each plant into a separate folder."""
    for plant in (*PLANTS, *OFFLOADED):
        forecast_memory(
            build, folder / folder_of(plant), world_size=WORLD_SIZE, settings={"plant": plant}
        )


def read(path: Path) -> GateMeasurements:
    """The measurements of one run."""
    return read_runs([open_run(path)])


def check_all(folder: Path, kind: str) -> Iterator[Outcome]:
    """Check each plant in a folder against the run without a plant."""
    baseline = make_baseline(read(folder / folder_of("nothing")))
    for plant in PLANTS:
        if not (folder / folder_of(plant)).exists():
            continue  # not recorded
        yield Outcome(plant, kind, check_run(read(folder / folder_of(plant)), baseline))
    if kind == FORECAST:
        offloaded = make_baseline(read(folder / "offloaded"))
        plant = "offload turned off"
        yield Outcome(plant, kind, check_run(read(folder / folder_of(plant)), offloaded))


def check_reruns(folder: Path, baseline: Baseline) -> Iterator[CheckResult]:
    """Check each rerun of the unchanged training."""
    for path in sorted(folder.glob("rerun-*")):
        yield check_run(read(path), baseline)
