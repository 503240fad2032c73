"""Answer a capacity question for a builder of the user's own: `--model module:function`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fsdp_inspect.errors import ConfigError
from fsdp_inspect.simulation.planning.builder_candidates import (
    BuilderCandidate,
    list_builder_candidates,
)
from fsdp_inspect.simulation.planning.builder_predictor import (
    BuilderPredictor,
    MakeForecast,
    find_knobs,
    least_memory,
)
from fsdp_inspect.simulation.planning.capacity_plan import MOST_GPUS, CapacityPlan, Shortfall
from fsdp_inspect.simulation.planning.machines import PlannedMachine
from fsdp_inspect.simulation.planning.prediction import FitVerdict
from fsdp_inspect.simulation.planning.search import search


def make_builder_plan(  # noqa: PLR0913 - the parts of one question
    forecast: MakeForecast,
    machine: PlannedMachine,
    preset: str,
    *,
    gpus: int,
    tokens: float,
    seq_len: int | None,
    batch_tokens: int | None,
    accepted: Sequence[str] | None,
    given: Mapping[str, Any],
) -> CapacityPlan:
    """Find the fastest settings of a builder that fit a budget.

    Args:
        forecast: Makes a forecast of the builder.
        machine: The machines with their budgets.
        preset: The name of the machines' preset.
        gpus: The number of GPUs.
        tokens: Tokens of the whole training.
        seq_len: Tokens of a sequence; None: as the builder states.
        batch_tokens: Tokens of a step over all GPUs; None: free, with one microbatch.
        accepted: The builder's keywords; None: any.
        given: The keywords that the user set.

    Raises:
        ForecastError: A forecast fails.
        ConfigError: No candidate has the requested batch, or the preset has too few GPUs.
    """
    machine.speed.links.ring(gpus, 1)  # rejects a preset without a network
    knobs, notes = find_knobs(forecast, gpus, accepted, given)
    predictor = BuilderPredictor(forecast, machine, gpus=gpus, tokens=tokens, seq_len=seq_len)
    candidates = list(list_builder_candidates(knobs))
    smallest = least_memory(candidates[0])
    first = predictor.step(smallest)
    if batch_tokens is not None:
        can_accumulate = accepted is None or "microbatches" in accepted
        listed = [
            predictor.with_batch(each, batch_tokens, can_accumulate=can_accumulate)
            for each in candidates
        ]
        candidates = [each for each in listed if each is not None]
    if not candidates:
        raise ConfigError(
            f"Invalid --batch-tokens {batch_tokens}: no batch of the builder on {gpus} GPUs makes "
            f"it. Expected a multiple of {first.tokens_of_microbatch(seq_len)} tokens and, for "
            "more than one microbatch, a keyword microbatches. Change --batch-tokens, or add the "
            "keyword to the builder."
        )
    found = search(predictor, candidates)
    best = found.best.candidate if found.best is not None else None
    chosen = predictor.step(best) if isinstance(best, BuilderCandidate) else None
    return CapacityPlan(
        model=first.manifest.name,
        num_parameters=first.manifest.model.num_parameters,
        gpus=gpus,
        gpu=machine.speed.gpu.name,
        preset=preset,
        seq_len=first.seq_len(seq_len),
        tokens=tokens,
        memory_bytes=machine.memory_bytes,
        host_memory_bytes=machine.host_bytes,
        found=found,
        shortfall=_find_shortfall(forecast, predictor, smallest) if best is None else None,
        notes=tuple(notes),
        plan=None if chosen is None else chosen.plan,
        job=None,
    )


def _find_shortfall(
    forecast: MakeForecast, predictor: BuilderPredictor, smallest: BuilderCandidate
) -> Shortfall:
    """What the settings with the least memory need."""
    unlimited = predictor.on(replace(predictor.machine, memory_bytes=1 << 62))
    memory = unlimited.memory(smallest)
    gpus, size = None, predictor.gpus * 2
    while size <= MOST_GPUS and gpus is None and predictor.machine.has_network:
        larger = BuilderPredictor(
            forecast, predictor.machine, gpus=size, tokens=1, seq_len=None
        ).memory(smallest)
        gpus = size if larger.verdict is FitVerdict.FITS else None
        size *= 2
    fits = memory.verdict is FitVerdict.FITS
    return Shortfall(memory.device.high if fits else None, gpus)
