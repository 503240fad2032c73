"""Find logged numbers that show a mistake: those of one rank, and a loss that does not come back.

- Seen: the numbers that each rank logs under a name such as `grad_norm` or `loss`, and the value
  that the first backward of a step begins from.
- Proof: ranks that train the same part of the model log different norms in every step. The norm of
  the whole gradient is one number. A note: one rank logs a loss, which is its own in every step,
  and the losses of other ranks differ.
- Refuted by: a name with "local" or "rank". A norm that one rank logs cannot be compared.
- A note: each of the last third of at least 30 losses is higher than the first one by 20%. A sum
  over steps, harder data, an adversary or reinforcement learning look the same.
"""

import math
import re
from collections.abc import Callable, Iterator

from fsdp_inspect.analysis.correctness.faults import Observed, TrainingCheck, TrainingFault
from fsdp_inspect.analysis.correctness.samples import differ
from fsdp_inspect.analysis.loss_spikes import find_loss_spikes
from fsdp_inspect.analysis.scalars import is_training_loss, measure_loss
from fsdp_inspect.formatting import format_ranks, plural
from fsdp_inspect.trace.sharders import DDP

_NORM = re.compile(r"(grad|gradient)s?[_/. -]?norm|norm[_/. -](grad|gradient)|gnorm", re.IGNORECASE)
_OWN = re.compile(r"local|rank|shard", re.IGNORECASE)
_LEAST_STEPS = 3
_TOLERANCE = 0.01
_SAME = 1e-6
"""A logged number that differs by less from the loss of its rank is that loss."""
_LEAST_LOSSES, _HIGHER, _LEAST_FIRST = 30, 1.2, 0.01
"""Losses to judge, how much higher they end, and the least first loss / the highest of the last."""
_APART = 1e-4
"""Losses of ranks that differ by more are not one loss."""


def check_logged(observed: Observed) -> Iterator[TrainingFault]:
    """Find a gradient norm of each rank's own part, and note a loss of one rank."""
    by_name = _numbers_by_name(observed, _NORM.search)
    yield from _own_loss(observed)
    yield from _ends_higher(observed)
    shared = {name: ranks for (name, _), ranks in by_name.items() if len(ranks) > 1}
    if not shared:
        observed.not_checked[TrainingCheck.LOGGED] = "Fewer than two ranks logged a gradient norm."
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
            f"{name} is the norm of each rank's own gradients.",
            f"In each of {plural(len(steps), 'step')}, {format_ranks(sorted(ranks))} logged "
            f"different values, such as {shown} in step {steps[0]}. The norm of the whole "
            f"gradient is one number.{of_whole}",
            "Log the return value of clip_grad_norm_ over all ranks, or the full_tensor() of the "
            'norm. If the norm of a rank is meant, name it so: "local_grad_norm".',
        )
        return


def _ends_higher(observed: Observed) -> Iterator[TrainingFault]:
    """Note a loss that rose from its first value and stays there; see `loss_spikes` for others."""
    loss = measure_loss(observed.run)
    if loss is None or len(loss.values) < _LEAST_LOSSES or not all(map(math.isfinite, loss.values)):
        return
    first, last = loss.values[0], loss.values[-len(loss.values) // 3 :]
    is_higher = min(last) > _HIGHER * first > _LEAST_FIRST * max(last)
    if not is_higher or any(each.recovered_at is None for each in find_loss_spikes(observed.run)):
        return
    yield TrainingFault(
        TrainingCheck.LOGGED,
        (loss.rank,),
        f"{loss.name} ends above its first value.",
        f"It is {first:.4g} in step {loss.steps[0]}, and {min(last):.4g} to {max(last):.4g} in the "
        f"last {len(last)} of {len(loss.values)} logged steps.",
        "Lower the learning rate, or let it rise more slowly at the start. If this loss need not "
        "fall, as a sum over steps, with harder data, an adversary or reinforcement learning, "
        "ignore this.",
        is_note=True,
    )


def _numbers_by_name(
    observed: Observed, matches: Callable[[str], object]
) -> dict[tuple[str, object], dict[int, dict[int, float]]]:
    """Logged numbers by name and part of the model, rank, and step."""
    found: dict[tuple[str, object], dict[int, dict[int, float]]] = {}
    for rank, record in observed.records.items():
        for code, name in enumerate(record.scalar_names):
            if matches(name) and not _OWN.search(name):
                table = observed.run.scalars(rank)
                rows = table.where(table.name == code)
                values = dict(zip(rows.step.tolist(), rows.value.tolist(), strict=True))
                found.setdefault((name, observed.model_part_of(rank)), {})[rank] = values
    return found


def _own_loss(observed: Observed) -> Iterator[TrainingFault]:
    """Note a loss that one rank logs, and that is its own."""
    for (name, _), by_rank in _numbers_by_name(observed, is_training_loss).items():
        if len(by_rank) > 1:
            continue
        [(rank, logged)] = by_rank.items()
        own = {each: seen.values.losses for each, seen in observed.seen.items()}
        others = [losses for each, losses in own.items() if each != rank]
        steps = [
            step
            for step in sorted(set(logged) & set(own.get(rank, ())))
            if any(step in each for each in others)
        ]
        is_own = all(not differ([logged[step], own[rank][step]], _SAME) for step in steps)
        apart = [
            differ([own[rank][step], *(each[step] for each in others if step in each)], _APART)
            for step in steps
        ]
        if len(steps) >= _LEAST_STEPS and is_own and all(apart):
            step = steps[0]
            shown = ", ".join(f"{each[step]:.4g}" for each in own.values() if step in each)
            yield TrainingFault(
                TrainingCheck.LOGGED,
                (rank,),
                f"{name} is the loss of rank {rank} only.",
                f"In each of {plural(len(steps), 'step')}, the logged value is the loss that this "
                f"rank's backward began from. In step {step}, the losses of the ranks are {shown}.",
                'Average the loss over the ranks before it is logged, or name it so: "local_loss".',
                is_note=True,
            )
            return
