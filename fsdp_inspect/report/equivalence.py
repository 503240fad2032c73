"""Render the comparison of a sharded step with the same step without sharding."""

from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from fsdp_inspect.comparison.equivalence import Equivalence, StepFault, StepStatus
from fsdp_inspect.formatting import format_ranks, format_unit, plural
from fsdp_inspect.report.layout import dim, indented, render_table, section
from fsdp_inspect.results import to_plain

_NEXT = {
    StepFault.OTHER_INPUTS: (
        "Make the batches repeatable: seed the data loader's sampler or generator, and run again."
    ),
    StepFault.STALE_PARAMETERS: (
        "Look for code that keeps gathered parameters, or changes the shards between the gather "
        "and the forward, such as a custom unshard or a copy of the weights."
    ),
    StepFault.OTHER_OUTPUT: (
        "Look at what this module does differently with sharded parameters: hooks, caches, "
        "random numbers outside torch, or code that reads a parameter's shape."
    ),
    StepFault.OTHER_LOSS: (
        "Make the loss repeatable: seed what it uses besides the model's output, such as labels, "
        "masks or another model, and run again."
    ),
    StepFault.MISSING_GRADIENT: (
        "Look for set_requires_gradient_sync(False) or set_is_last_backward(False) that stays in "
        "place at the last backward of a step."
    ),
    StepFault.NOT_REDUCED: (
        "Check that the process group has all ranks. Let a unit hold parameters outside all units, "
        "or reduce their gradients in the script. Check ignored_params, no_sync, custom "
        "reduce-scatters and set_requires_all_reduce(False)."
    ),
    StepFault.SCALED: (
        "Check set_gradient_divide_factor, custom reduce-scatters and gradient hooks."
    ),
    StepFault.LOST_PRECISION: (
        "Check the mixed precision policy of this unit, and hooks that cast gradients."
    ),
    StepFault.OTHER_GRADIENT: (
        "Look at the unit's hooks, its custom collectives, and code that changes gradients."
    ),
    StepFault.DIVIDED_TWICE: (
        "Remove the division: the gradients are averaged over the ranks already."
    ),
}


def render_equivalence(found: Equivalence) -> RenderableType:
    """Render the sentence, its evidence, the next step and the units."""
    style = {"equal": "bold", "different": "bold red"}.get(found.status.value, "bold yellow")
    lines: list[RenderableType] = [Text(describe_equivalence(found), style=style)]
    lines += [indented(each) for each in describe_evidence(found)]
    next_step = name_next_step(found)
    if next_step:
        lines += ["", Text(f"Next: {next_step}")]
    if found.units:
        shown = render_table(
            Equivalence.TABLE,
            list(found.units),
            *("unit", "gradient_norm", "error_ratio", "tolerance_ratio", "reduce_dtype", "fault"),
        )
        lines += section(Equivalence.TABLE.title, shown)
    return Group(*lines, *(dim(note) for note in found.notes))


def describe_equivalence(found: Equivalence) -> str:
    """The result in one sentence."""
    where = "parameters outside all units" if found.unit is None else format_unit(found.unit)
    ranks = format_ranks(found.ranks)
    sentences = {
        StepFault.OTHER_INPUTS: f"Cannot tell: {ranks} got different batches in the two runs.",
        StepFault.STALE_PARAMETERS: (
            f"The forward of {where} used stale parameters: not the values of its shards."
        ),
        StepFault.OTHER_OUTPUT: (
            f"The forward output of {where} differs, with equal inputs and parameters."
        ),
        StepFault.OTHER_LOSS: (
            f"Cannot tell: on {ranks}, the loss differs between the runs, with equal outputs."
        ),
        StepFault.MISSING_GRADIENT: f"The sharded gradient of {where} is missing.",
        StepFault.NOT_REDUCED: f"The gradient of {where} is not reduced over the ranks.",
        StepFault.SCALED: (
            f"The gradient of {where} is {_factor(found.factor)} times the mean over ranks."
        ),
        StepFault.LOST_PRECISION: f"The gradient of {where} lost precision.",
        StepFault.OTHER_GRADIENT: f"The gradient of {where} differs by more than rounding.",
        StepFault.DIVIDED_TWICE: "The gradients are divided by the number of ranks twice.",
    }
    if found.fault is not None:
        sentence = sentences[found.fault]
        if found.status is StepStatus.UNKNOWN and not sentence.startswith("Cannot tell"):
            return f"Cannot tell: {sentence[0].lower()}{sentence[1:]}"
        return sentence
    if found.status is StepStatus.UNKNOWN and found.units:
        return "Cannot tell: on one rank, nothing is sharded and no gradient is reduced."
    if found.status is StepStatus.UNKNOWN:
        return "Cannot tell: no parameter has a gradient in both runs."
    return "The sharded step equals the step without sharding."


def describe_evidence(found: Equivalence) -> list[str]:
    """The numbers behind the sentence."""
    lines = [
        f"Step {found.step}, {plural(found.world_size, 'rank')}, "
        f"{plural(found.num_backwards, 'backward')} in the step. "
        "Gradients are those after the last backward."
    ]
    faulty = [each for each in found.units if each.fault is not None]
    if found.units and not faulty:
        worst = max(found.units, key=lambda each: each.error_ratio)
        lines.append(
            f"The gradients of {plural(len(found.units), 'unit')} agree within rounding. "
            f"Largest error: {worst.error_ratio:.1e} of the norm, tolerance "
            f"{worst.tolerance_ratio:.1e}."
        )
    for each in faulty[:1]:
        lines.append(
            f"Error: {each.error_ratio:.1e} of the norm, tolerance {each.tolerance_ratio:.1e}. "
            f"Largest in {each.worst_parameter}. {len(faulty)} of {len(found.units)} units differ."
        )
        if each.lost_dtype:
            lines.append(
                f"Each of its values fits {each.lost_dtype}, but parameters and reduction are "
                f"declared {each.reduce_dtype}."
            )
    if found.fault is StepFault.LOST_PRECISION and not faulty:
        lines.append(
            "After the backward, its gradients have the declared precision. At the update, each "
            "value fits a dtype of 16 bits. The script rounded them in between."
        )
    if found.fault is StepFault.SCALED and found.divide_factor is not None:
        lines.append(
            f"The script sets the divide factor {found.divide_factor:g}"
            + (f" at {found.location}" if found.location else "")
            + f"; the mean over {found.world_size} ranks has {found.world_size}."
        )
        if found.status is StepStatus.UNKNOWN:
            lines.append("This is right if the loss is divided by a total over all ranks.")
    if found.fault is StepFault.DIVIDED_TWICE:
        where = f"the loss at {found.location}" if found.location else "the gradients"
        lines.append(
            f"The script multiplies {where} by {_factor(found.factor)}, and the sharder divides "
            f"the gradients by {found.world_size}."
        )
    if found.ranks and found.fault not in (StepFault.OTHER_INPUTS, StepFault.OTHER_LOSS):
        lines.append(f"Seen on {format_ranks(found.ranks)}.")
    if found.is_deterministic is not None:
        same = "the same" if found.is_deterministic else "different"
        lines.append(f"A second sharded run gave {same} gradients.")
    return lines


def name_next_step(found: Equivalence) -> str:
    """The next step for the user; empty if the steps are equal, or if none is known."""
    if found.fault is None:
        is_alone = found.status is StepStatus.UNKNOWN and bool(found.units)
        return "Run it on two or more ranks: torchrun --nproc-per-node 2." if is_alone else ""
    if found.status is StepStatus.UNKNOWN and found.fault is StepFault.OTHER_OUTPUT:
        return "Make the step deterministic (seeds, torch.use_deterministic_algorithms)."
    if found.status is StepStatus.UNKNOWN and found.fault is StepFault.SCALED:
        return "If the loss is a mean over the rank's own batch, remove the divide factor."
    return _NEXT[found.fault]


def equivalence_to_dict(found: Equivalence) -> dict[str, Any]:
    """The result as JSON values, with the sentence, the evidence and the next step."""
    return {
        "sentence": describe_equivalence(found),
        **to_plain(found),
        "evidence": describe_evidence(found),
        "next": name_next_step(found),
    }


def _factor(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4g}"
