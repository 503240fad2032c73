"""Find a gradient norm of each rank's own part that is logged as that of the model.

- Seen: the numbers that each rank logs under a name such as `grad_norm`.
- Proof: ranks that train the same part of the model log different norms in every step. The norm of
  the whole gradient is one number.
- Refuted by: a name with "local" or "rank". A number that one rank logs cannot be compared.
"""

import math
import re
from collections.abc import Iterator

from fsdp_inspect.analysis.correctness.faults import Observed, TrainingCheck, TrainingFault
from fsdp_inspect.analysis.correctness.samples import differ
from fsdp_inspect.formatting import format_ranks, plural
from fsdp_inspect.trace.sharders import DDP

_NORM = re.compile(r"(grad|gradient)s?[_/. -]?norm|norm[_/. -](grad|gradient)|gnorm", re.IGNORECASE)
_OWN = re.compile(r"local|rank|shard", re.IGNORECASE)
_LEAST_STEPS = 3
_TOLERANCE = 0.01


def check_logged(observed: Observed) -> Iterator[TrainingFault]:
    """Find a gradient norm of each rank's own part."""
    by_name: dict[tuple[str, object], dict[int, dict[int, float]]] = {}
    for rank, record in observed.records.items():
        for code, name in enumerate(record.scalar_names):
            if _NORM.search(name) and not _OWN.search(name):
                table = observed.run.scalars(rank)
                rows = table.where(table.name == code)
                values = dict(zip(rows.step.tolist(), rows.value.tolist(), strict=True))
                by_name.setdefault((name, observed.model_part_of(rank)), {})[rank] = values
    shared = {name: ranks for (name, _), ranks in by_name.items() if len(ranks) > 1}
    if not shared:
        observed.not_checked[TrainingCheck.LOGGED] = (
            "Fewer than two ranks logged a gradient norm. A loss of one rank cannot be told from "
            "the mean over all ranks."
        )
        return
    for name, ranks in shared.items():
        steps = sorted(set.intersection(*(set(each) for each in ranks.values())))
        found = [[each[step] for each in ranks.values()] for step in steps]
        wrong = [
            each for each in found if all(map(math.isfinite, each)) and differ(each, _TOLERANCE)
        ]
        if len(steps) < _LEAST_STEPS or len(wrong) < len(steps):
            continue
        shown = ", ".join(f"{value:.3g}" for value in found[0][:4])
        whole = math.sqrt(math.fsum(value * value for value in found[0]))
        is_part = observed.run.manifest.sharder != DDP
        of_whole = f" If the ranks hold all parts, the norm is {whole:.3g}." if is_part else ""
        yield TrainingFault(
            TrainingCheck.LOGGED,
            tuple(sorted(ranks)),
            False,
            f"{name} is the norm of each rank's own gradients.",
            f"In each of {plural(len(steps), 'step')}, {format_ranks(sorted(ranks))} logged "
            f"different values, such as {shown} in step {steps[0]}. The norm of the whole "
            f"gradient is one number.{of_whole}",
            "Log the return value of clip_grad_norm_ over all ranks, or the full_tensor() of the "
            'norm. If the norm of a rank is meant, name it so: "local_grad_norm".',
        )
        return
