"""Word the remedies of findings in the settings of the run's sharder.

The rules name settings of FSDP2. For another sharder, a finding keeps its evidence and names that
sharder's own setting. A finding without a counterpart is left out: it would be advice that cannot
be followed.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from fsdp_inspect.advice.evidence import Finding
from fsdp_inspect.trace.sharders import DDP, FSDP1


@dataclass(frozen=True, slots=True)
class SharderRemedy:
    """The remedy for a rule under one sharder."""

    steps: tuple[str, ...]
    snippet: str = ""


_FSDP1_REMEDIES: dict[str, SharderRemedy | None] = {
    "R1": SharderRemedy(
        ("Wrap every transformer block with an auto-wrap policy.",),
        "FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}), ...)",
    ),
    "R3": SharderRemedy(("Wrap its parts too, each with the norm that feeds it.",)),
    "R11": None,  # FSDP1 has no lists of units to prefetch
    "R14": SharderRemedy(
        (
            "If the model may compute in 16 bits, gather in 16 bits: "
            "MixedPrecision(param_dtype=torch.bfloat16) halves the messages.",
        ),
        "precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)\n"
        "FullyShardedDataParallel(model, mixed_precision=precision, ...)",
    ),
    "R20": SharderRemedy(("Unset the variable (it serves tensor parallelism), and record again.",)),
    "R26": None,  # the recorder observes no pinning of FSDP1, which always pins
    "R27": None,  # FSDP1 requires tied weights to be in one unit
    "R29": SharderRemedy(
        (
            "If a full copy of the frozen modules fits, leave them out with ignored_states, or "
            "keep them gathered until backward (ShardingStrategy.SHARD_GRAD_OP).",
        ),
        "FullyShardedDataParallel(model, ignored_states=frozen_modules, ...)",
    ),
    "R30": None,  # FSDP1 pads a unit as a whole: less than one element per rank
}
_DDP_REMEDIES: dict[str, SharderRemedy | None] = {
    "R1": None,
    "R3": None,
    "R11": None,
    "R14": None,
    "R20": SharderRemedy(("Unset the variable (it serves tensor parallelism), and record again.",)),
    "R26": None,
    "R27": None,
    "R29": None,
    "R30": None,
}
_REMEDIES = {FSDP1: _FSDP1_REMEDIES, DDP: _DDP_REMEDIES}
"""Remedies by sharder, then by rule; None: the finding does not apply. Other rules concern no
setting of a sharder."""


def in_words_of(sharder: str, findings: Iterable[Finding]) -> Iterator[Finding]:
    """The findings that apply to a sharder, with its own remedies."""
    remedies = _REMEDIES.get(sharder, {})
    for finding in findings:
        if finding.rule not in remedies:
            yield finding
            continue
        remedy = remedies[finding.rule]
        if remedy is not None:
            # No plan is simulated, so no plan contains the change.
            effect = replace(finding.effect, played_by="")
            yield replace(finding, do=remedy.steps, snippet=remedy.snippet, effect=effect)
