"""Describe the changes of a plan in words, and name the tuning rule of each."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fsdp_inspect.advice.plan_space import Choice


def rule_of(choice: Choice, name: str, rules: Mapping[str, str]) -> str:
    """The tuning rule behind one change.

    Args:
        choice: The changed settings.
        name: The setting.
        rules: The rule of each grouping of units.
    """
    if name == "reshard":
        return _rule_of_reshard(choice.reshard)
    if name == "grouping" and choice.grouping is not None:
        return rules[choice.grouping]
    if name == "num_kept" and choice.num_kept == 1:
        return "R4"
    if name == "forward_prefetch":
        return "R9" if (choice.forward_prefetch or 0) < 2 else "R10"
    return {
        "num_kept": "R6",
        "backward_prefetch": "R11",
        "reduce_buffers": "R10",
        "separate_reduce_group": "R25",
        "async_gathers": "R22",
        "replicas": "R15",
        "embedding_in_backward": "R28",
        "accumulation_sync": "R16",
        "keep_between_microbatches": "R17",
        "checkpointing": "R18",
        "param_dtype": "R14",
        "reduce_dtype": "R13",
    }[name]


def say_changes(choice: Choice) -> str:
    """Describe the changes of a choice."""
    return _sentence(", ".join(_words(choice))) or "Change nothing"


def _words(choice: Choice) -> Iterator[str]:
    """The words of each change."""
    values = {name: getattr(choice, name) for name in choice.changed}
    yield from (_WORDS[name](value) for name, value in values.items())


_WORDS: Mapping[str, Callable[[Any], str]] = {
    "grouping": str,
    "reshard": lambda value: _say_reshard(value),
    "checkpointing": lambda value: (
        f"repeat the forward of every block in backward (activation checkpointing, {value})"
    ),
    "num_kept": lambda value: (
        f"keep the last {_counted(value)} unsharded after forward (reshard_after_forward=False)"
    ),
    "forward_prefetch": lambda value: f"prefetch {_counted(value)} ahead in forward",
    "backward_prefetch": lambda value: f"prefetch {_counted(value)} ahead in backward",
    "reduce_buffers": lambda value: f"allow {value} reduce-scatter inputs at once",
    "separate_reduce_group": lambda value: (
        f"use {'a separate' if value else 'no separate'} communicator for reduce-scatter"
    ),
    "async_gathers": lambda value: f"gather asynchronously (unshard_async_op={value})",
    "embedding_in_backward": lambda value: (
        f"{'gather' if value else 'do not gather'} the embedding again in backward "
        f"(unshard_in_backward={value})"
    ),
    "replicas": lambda value: f"keep {value} copies of the model (HSDP)",
    "accumulation_sync": lambda value: (
        "reduce gradients with the last microbatch only"
        if value == "last"
        else "reduce gradients with every microbatch"
    ),
    "keep_between_microbatches": lambda value: (
        f"{'keep' if value else 'do not keep'} parameters unsharded between microbatches "
        f"(reshard_after_backward={not value})"
    ),
    "param_dtype": lambda value: f"gather in {value}",
    "reduce_dtype": lambda value: f"reduce gradients in {value}",
}


def _say_reshard(reshard: bool | int) -> str:
    if isinstance(reshard, bool):
        done = "reshard parameters after" if reshard else "keep parameters unsharded after"
    else:
        done = f"keep parameters sharded over {reshard} ranks after"
    return f"{done} forward (reshard_after_forward={reshard})"


def _rule_of_reshard(reshard: bool | int | None) -> str:
    """R6: kept unsharded. R5: resharded. R7: resharded to the ranks of a node."""
    if isinstance(reshard, bool) or reshard is None:
        return "R5" if reshard else "R6"
    return "R7"


def _counted(units: int) -> str:
    return f"{units} unit{'s' * (units != 1)}"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
