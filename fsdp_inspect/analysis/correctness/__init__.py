"""Judge whether the training is right, before its speed.

Each check states what it saw. It is silent if a legal loop could look the same, or if what it needs
was not observed: then `not_checked` has the reason. The recorder observes (`trace.correctness`).
Each check has a file, which names its fault, its proof and the legal loops that look alike.
"""

from fsdp_inspect.analysis.context import RunContext
from fsdp_inspect.analysis.correctness.accumulation import check_accumulation
from fsdp_inspect.analysis.correctness.batches import check_batches
from fsdp_inspect.analysis.correctness.clipping import check_clipping
from fsdp_inspect.analysis.correctness.coverage import check_coverage
from fsdp_inspect.analysis.correctness.faults import (
    Correctness,
    Observed,
    TrainingCheck,
    TrainingFault,
)
from fsdp_inspect.analysis.correctness.gradients import check_gradients
from fsdp_inspect.analysis.correctness.late import check_late
from fsdp_inspect.analysis.correctness.logged import check_logged
from fsdp_inspect.analysis.correctness.mode import check_mode
from fsdp_inspect.analysis.correctness.optimizer import check_optimizer
from fsdp_inspect.analysis.correctness.precision import check_precision
from fsdp_inspect.analysis.correctness.random_state import check_random
from fsdp_inspect.analysis.correctness.replicas import check_replicas
from fsdp_inspect.analysis.correctness.resume import check_resume
from fsdp_inspect.analysis.correctness.scales import check_scales
from fsdp_inspect.analysis.correctness.stale import check_stale
from fsdp_inspect.analysis.correctness.token_means import check_loss
from fsdp_inspect.analysis.correctness.values import check_finite
from fsdp_inspect.trace.run import RunSource
from fsdp_inspect.trace.sharders import DEEPSPEED

__all__ = ["Correctness", "TrainingCheck", "TrainingFault", "check_training"]

_CHECKS = (
    check_finite,
    check_resume,
    check_optimizer,
    check_gradients,
    check_late,
    check_scales,
    check_coverage,
    check_stale,
    check_mode,
    check_replicas,
    check_accumulation,
    check_clipping,
    check_precision,
    check_logged,
    check_batches,
    check_random,
    check_loss,
)
"""In the order of `TrainingCheck`."""
_IN_UPDATES = (
    *(TrainingCheck.OPTIMIZER, TrainingCheck.GRADIENTS, TrainingCheck.PARAMETERS),
    *(TrainingCheck.REPLICAS, TrainingCheck.ACCUMULATION, TrainingCheck.CLIPPING),
    TrainingCheck.PRECISION,
)
_OF_DEEPSPEED = (
    "DeepSpeed updates flat copies of the parameters in its own optimizer, whose values are not "
    "sampled."
)


def check_training(run: RunSource) -> Correctness:
    """Judge what the ranks observed."""
    seen = {record.rank: record.training for record in run.ranks if record.training is not None}
    if not seen:
        reason = "No rank observed its first steps: an import, a forecast or an earlier recording."
        return Correctness((), (), dict.fromkeys((each.value for each in TrainingCheck), reason))
    observed = Observed(RunContext.of(run), seen, {record.rank: record for record in run.ranks})
    found = [fault for check in _CHECKS for fault in check(observed)]
    if run.manifest.sharder in DEEPSPEED:
        for check in observed.not_checked.keys() & _IN_UPDATES:
            observed.not_checked[check] = _OF_DEEPSPEED
    return Correctness(
        tuple(each for each in found if not each.is_note),
        tuple(each for each in found if each.is_note),
        observed.not_checked,
    )
