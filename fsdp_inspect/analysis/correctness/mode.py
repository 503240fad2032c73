"""Find models that train in evaluation mode, in which dropout is off.

- Seen: in each update, whether the dropouts and batch normalizations of a model are in training
  mode.
- Proof: none of them is from some update on, for at least 8 updates and until the last one, after
  updates in which some were. The parameters have gradients then. Note: none ever was, and some
  are dropouts.
- Refuted by: training mode before the next update; batch normalizations alone that are frozen
  while the model is in training mode; dropout with rate 0. Training without dropout on purpose
  looks the same: hence "Probably".
"""

from collections.abc import Iterator

from fsdp_inspect.analysis.correctness.faults import Observed, TrainingCheck, TrainingFault
from fsdp_inspect.formatting import plural
from fsdp_inspect.trace.correctness import ModeSeen

_LEAST_OFF = 8
_LEAST_ON = 3


def check_mode(observed: Observed) -> Iterator[TrainingFault]:
    """Find models that train in evaluation mode."""
    off: dict[str, dict[int, ModeSeen]] = {}
    for rank, seen in observed.seen.items():
        for each in seen.modes:
            if each.num_off >= _LEAST_OFF:
                off.setdefault(each.model, {})[rank] = each
    for ranks in off.values():
        first = ranks[min(ranks)]
        if first.num_on >= _LEAST_ON:
            yield _left_on(tuple(sorted(ranks)), first)
        elif not first.num_on and first.num_dropouts:
            yield _never_off(tuple(sorted(ranks)), first)


def _left_on(ranks: tuple[int, ...], seen: ModeSeen) -> TrainingFault:
    return TrainingFault(
        TrainingCheck.MODE,
        ranks,
        f"The model trains in evaluation mode since step {seen.since}.",
        f"In each update from step {seen.since} on, {_describe(seen)}. Before, this was not so.",
        "Call model.train() after each evaluation. If this is meant, ignore this.",
    )


def _never_off(ranks: tuple[int, ...], seen: ModeSeen) -> TrainingFault:
    return TrainingFault(
        TrainingCheck.MODE,
        ranks,
        "The model trains in evaluation mode.",
        f"In each update, {_describe(seen)}.",
        "Call model.train() before the first update: from_pretrained() returns models in "
        "evaluation mode. If training without dropout is meant, ignore this.",
        is_note=True,
    )


def _describe(seen: ModeSeen) -> str:
    parts = []
    if seen.num_dropouts:
        verb = "is" if seen.num_dropouts == 1 else "are"
        rate = f"with rates up to {seen.largest_dropout:.3g}"
        parts.append(f"{plural(seen.num_dropouts, 'dropout')} {rate} {verb} off")
    if seen.num_batch_norms:
        verb = "uses" if seen.num_batch_norms == 1 else "use"
        number = plural(seen.num_batch_norms, "batch normalization")
        parts.append(f"{number} {verb} stored statistics")
    return f"the training mode of {seen.model} was off: {' and '.join(parts)}"
