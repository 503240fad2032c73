"""Find an optimizer that holds none of the model's parameters.

- Seen: the tensors of each optimizer in the first 8 updates.
- Proof: none is a parameter of the model or ever has a gradient, and the model's parameters have
  some.
- Refuted by: one such tensor. The optimizer of another model has gradients.
"""

from collections.abc import Iterator

from fsdp_inspect.analysis.correctness.faults import Observed, TrainingCheck, TrainingFault
from fsdp_inspect.formatting import plural


def check_optimizer(observed: Observed) -> Iterator[TrainingFault]:
    """Find an optimizer that holds none of the model's parameters."""
    if not any(each.optimizers for each in observed.seen.values()):
        observed.not_checked[TrainingCheck.OPTIMIZER] = (
            "No update of a torch optimizer was observed, or more than 16 optimizers step."
        )
    stale = {
        rank: each
        for rank, each in observed.seen.items()
        if each.num_with_gradient
        and each.optimizers
        and not any(one.num_of_model or one.num_with_gradient for one in each.optimizers)
    }
    if not stale:
        return
    first = stale[min(stale)]
    optimizer = first.optimizers[0]
    is_old = all(
        one.num_tensors == one.num_alike > 0 for each in stale.values() for one in each.optimizers
    )
    origin = (
        " They have the shapes of the model's whole parameters: those of a copy, or of this model "
        "before it was sharded."
        if is_old
        else ""
    )
    yield TrainingFault(
        TrainingCheck.OPTIMIZER,
        tuple(sorted(stale)),
        "The optimizer updates no parameter of the model.",
        f"None of its {plural(optimizer.num_tensors, 'tensor')} is a parameter of the model or had "
        f"a gradient in {plural(optimizer.num_steps, 'update')}, while "
        f"{first.num_with_gradient} of the model's {first.num_trainable} parameters have gradients."
        f"{origin}",
        "Create the optimizer from the parameters of the model that trains, after it is sharded.",
        optimizer.place,
        is_certain=is_old,
    )
