"""Compare the choice of `fsdp-inspect plan` with all plans of a grid.

- Time: for each shape and link, one run on virtual time calibrates the rate of compute, as
  `--calibrate` does. All plans of the grid run under emulation on virtual time. For every budget of
  memory that separates two plans, the chosen plan is compared with the fastest of the plans that
  are reported to fit.
- Memory: each plan of the grid is forecast on larger models, with FSDP2's own code on fake tensors
  and the model of CUDA's allocator. For several budgets, the search reports plans that fit, with
  and without these forecasts. A reported plan does not fit if its forecast, with the typical memory
  outside the allocator, is above the budget.

[Note: what the grid leaves out] The emulation runs on one thread, which does not run ahead of the
device. So every plan that runs prefetches one unit in forward, which a GPU's streams do by
themselves, and the grid has no other prefetch. It has no offload, tensor parallelism or selective
checkpointing, whose times depend on the device. The peak of a run on CPU is not that of a device,
because its kernels save other tensors.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from fsdp_inspect import forecast_memory
from fsdp_inspect.formatting import format_ns
from fsdp_inspect.hardware import GPUS
from fsdp_inspect.simulation.planning.candidates import Candidate, Job, list_candidates
from fsdp_inspect.simulation.planning.estimates import ValueOrigin
from fsdp_inspect.simulation.planning.forecast_step import ForecastStep, read_forecast
from fsdp_inspect.simulation.planning.machines import (
    PlannedMachine,
    make_machine,
    measure_calibration,
)
from fsdp_inspect.simulation.planning.prediction import judge_forecast, predict_memory
from fsdp_inspect.simulation.planning.search import FormulaPredictor, search
from fsdp_inspect.simulation.planning.transformer import Transformer, load_model
from fsdp_inspect.simulation.planning.workload import Links, Speed, plan_of
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.links import Preset
from instrumented_trainer.forecasting import build
from tests.studies.validation.emulated import VIRTUAL_STEPS, run_trainer
from tests.studies.validation.outcomes import only_run, work_of

RANKS = 8
SEQ_LEN = 32
BATCH_SIZES = (1, 2)
_FORWARD_NS = 30
"""Compute of a parameter in the forward of one sequence; backward takes twice as long."""
SHAPES = {
    "deep": Transformer(
        name="deep",
        dim=128,
        num_layers=8,
        num_heads=4,
        num_kv_heads=2,
        ffn_dim=352,
        vocab_size=256,
        head_dim=32,
    ),
    "wide": Transformer(
        name="wide",
        dim=256,
        num_layers=4,
        num_heads=4,
        num_kv_heads=4,
        ffn_dim=1024,
        vocab_size=256,
        head_dim=64,
    ),
    "small blocks": Transformer(
        name="small blocks",
        dim=96,
        num_layers=12,
        num_heads=4,
        num_kv_heads=4,
        ffn_dim=256,
        vocab_size=256,
        head_dim=24,
    ),
}
LINKS = {
    "one node": Preset(
        name="one node", gpus_per_node=8, intra=(100e6, 200_000), inter=None, source="made up"
    ),
    "two nodes": Preset(
        name="two nodes",
        gpus_per_node=4,
        intra=(1e9, 100_000),
        inter=(15e6, 205_000),
        source="made up",
    ),
}


MODELS = {"llama-1b": 4, "llama-8b": 3, "llama-70b": 2}
"""The forecast presets, each with its number of layers."""
FORECAST_SEQ_LEN = 1024
NUM_BUDGETS = 16
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ChoiceOutcome:
    """The choices of the search on one grid, for all budgets of memory."""

    name: str
    num_plans: int
    num_budgets: int
    behind_best: float
    """Measured time for a token of the chosen plan / that of the best plan - 1; worst budget."""
    chosen: str
    """The chosen plan of that budget."""
    best: str
    """The fastest plan, as measured, of those that are reported to fit that budget."""
    step_errors: tuple[float, ...]
    """By plan of the grid: predicted / measured time for a token - 1."""


@dataclass(frozen=True, slots=True)
class Reported:
    """The plans that the search reports to fit, over all budgets."""

    num_plans: int = 0
    num_wrong: int = 0
    """Plans that do not fit."""


@dataclass(frozen=True, slots=True)
class FitOutcome:
    """The plans that are reported to fit a model of the grid, compared with forecasts."""

    name: str
    num_plans: int
    num_budgets: int
    reported: Reported
    """With forecasts of the plans to report, as the command does."""
    unsettled: Reported
    """From closed formulas alone (`--no-forecast`)."""
    errors: tuple[float, ...]
    """By plan of the grid: planned allocated peak from formulas / forecast - 1."""


def judge_choices(folder: Path, num_plans: int, say: Callable[[str], None]) -> list[ChoiceOutcome]:
    """Judge the choice for each shape and link.

    Args:
        folder: The folder for the runs.
        num_plans: The highest number of plans of each grid, which are drawn from it.
        say: Called with a line about each run.
    """
    return [
        ChoiceGrid(folder / f"{shape}, {link}", SHAPES[shape], LINKS[link], num_plans, say).judge()
        for shape in SHAPES
        for link in LINKS
    ]


def judge_fits(folder: Path, num_plans: int, say: Callable[[str], None]) -> list[FitOutcome]:
    """Judge the planned memory of each model; the arguments are those of `judge_choices`."""
    return [_judge_fits(folder / preset, preset, num_plans, say) for preset in MODELS]


def _judge_fits(
    folder: Path, preset: str, num_plans: int, say: Callable[[str], None]
) -> FitOutcome:
    model, _ = load_model(preset)
    job = Job(
        model=replace(model, num_layers=MODELS[preset]),
        gpus=RANKS,
        gpus_per_node=RANKS // 2,
        seq_len=FORECAST_SEQ_LEN,
        tokens=1e9,
    )
    machine = make_machine("h200-ib400", gpus_per_node=job.gpus_per_node)
    candidates = _spread(plans_of_grid(job), num_plans)
    steps: dict[Candidate, ForecastStep] = {}
    errors: list[float] = []
    for candidate in candidates:
        run = folder / _words(candidate)
        settings = {"preset": preset, "num_layers": MODELS[preset], "seq_len": job.seq_len}
        forecast_memory(build, run, world_size=RANKS, settings=settings | _settings(candidate))
        steps[candidate] = read_forecast(open_run(run))
        planned = predict_memory(job, machine, candidate).allocated.value
        errors.append(planned / steps[candidate].peak_allocated_bytes - 1)
        say(f"{preset}: {_words(candidate)}: allocated {errors[-1]:+.1%}")
    needs = {each: judge_forecast(machine, step).device.value for each, step in steps.items()}
    highs = [predict_memory(job, machine, each).device.high for each in candidates]
    budgets = _spread(sorted({math.ceil(size) for size in (*highs, *needs.values())}), NUM_BUDGETS)

    def report(forecast: Callable[[Candidate], ForecastStep | None] | None) -> Reported:
        num_reported = num_wrong = 0
        for budget in budgets:
            limited = replace(machine, memory_bytes=budget)
            found = search(FormulaPredictor(job, limited, forecast), candidates)
            for each in (found.best, *found.runners_up):
                if each is not None and isinstance(each.candidate, Candidate):
                    num_reported += 1
                    num_wrong += needs[each.candidate] > budget
        return Reported(num_reported, num_wrong)

    outcome = FitOutcome(
        name=preset,
        num_plans=len(candidates),
        num_budgets=len(budgets),
        reported=report(steps.get),
        unsettled=report(None),
        errors=tuple(errors),
    )
    say(f"{preset}: {outcome.reported}, without forecasts {outcome.unsettled}")
    return outcome


def _settings(candidate: Candidate) -> dict[str, str | int]:
    """The keywords of the trainer's builder. By default, torch reshards all units but the root."""
    kept = {} if candidate.reshard_after_forward else {"reshard_after_forward": "false"}
    return kept | {
        "batch_size": candidate.batch_size,
        "checkpointing": candidate.checkpointing,
        "wrap": f"every:{candidate.blocks_per_unit}",
        "param_dtype": candidate.param_dtype,
        "mesh": f"{candidate.replicas}x{RANKS // candidate.replicas}",
    }


class ChoiceGrid:
    """The plans for one shape and link."""

    def __init__(
        self,
        folder: Path,
        model: Transformer,
        link: Preset,
        num_plans: int,
        say: Callable[[str], None],
    ) -> None:
        """Prepare the grid; this runs nothing. The arguments are those of `judge_choices`."""
        self._folder = folder
        self._say = say
        self._link = link
        self._name = f"{model.name}, {link.name}"
        self._job = Job(
            model=model,
            gpus=RANKS,
            gpus_per_node=link.gpus_per_node,
            seq_len=SEQ_LEN,
            tokens=1e9,
        )
        self.candidates = _spread(plans_of_grid(self._job), num_plans)

    def judge(self) -> ChoiceOutcome:
        """Run all plans, choose a plan for each budget, and compare."""
        times = {each: self._measure(each) for each in self.candidates}
        predictor = FormulaPredictor(self._job, self._machine)
        needs = {each: predictor.memory(each).device.high for each in self.candidates}
        worst: tuple[float, str, str] = (0.0, "", "")
        budgets = sorted({math.ceil(need) for need in needs.values()})
        for budget in budgets:
            machine = replace(self._machine, memory_bytes=budget)
            found = search(FormulaPredictor(self._job, machine), self.candidates).best
            assert found is not None, "the plan with the lowest need fits"
            chosen = found.candidate
            assert isinstance(chosen, Candidate)
            fitting = [each for each in self.candidates if needs[each] <= budget]
            best = min(fitting, key=lambda each: times[each])
            worst = max(worst, (times[chosen] / times[best] - 1, _words(chosen), _words(best)))
        self._say(f"{self._name}: {worst[0]:+.1%} to the best, {worst[1]}")
        return ChoiceOutcome(
            name=self._name,
            num_plans=len(self.candidates),
            num_budgets=len(budgets),
            behind_best=worst[0],
            chosen=worst[1],
            best=worst[2],
            step_errors=tuple(
                predictor.ns_per_token(each) / times[each] - 1 for each in self.candidates
            ),
        )

    @cached_property
    def _machine(self) -> PlannedMachine:
        """A machine without copies and launches, with the rate of a run and any memory."""
        rate = measure_calibration(only_run(self._train(Candidate(param_dtype="float32")))).flops
        gpu = replace(
            GPUS["h200-ib400"],
            bf16_flops=rate,
            fp32_flops=rate,
            memory_bytes_per_s=1e18,
            host_bytes_per_s=1e18,
        )
        links = Links(self._link, self._link.gpus_per_node)
        speed = Speed(gpu, links, efficiency=1.0, host_optimizer_s=0.0, launch_ratio=0.0)
        return PlannedMachine(
            speed=speed,
            fast=speed,
            slow=speed,
            memory_bytes=1 << 62,
            host_bytes=None,
            origin=ValueOrigin.CALIBRATED,
            is_calibrated=True,
            assumption="The rate of compute is that of an emulated run.",
        )

    def _measure(self, candidate: Candidate) -> float:
        """The measured time of a step for each of its tokens, ns."""
        step_ns = work_of(self._train(candidate)).step_time_ns
        self._say(f"{self._name}: {_words(candidate)}: {format_ns(step_ns)}")
        return step_ns / self._job.tokens_of_step(candidate)

    def _train(self, candidate: Candidate) -> Path:
        """Run a plan on virtual time; returns the folder of its run."""
        folder = self._folder / _words(candidate)
        folder.mkdir(parents=True, exist_ok=True)
        plan = plan_of(self._job, candidate).model_copy(update={"forward_prefetch": 1})
        plan.dump(folder / "plan.toml")
        model, forward = self._job.model, _FORWARD_NS * candidate.batch_size
        options = {
            "plan": folder / "plan.toml",
            "dim": model.dim,
            "num-layers": model.num_layers,
            "num-heads": model.num_heads,
            "num-kv-heads": model.num_kv_heads,
            "ffn-dim": model.ffn_dim,
            "vocab-size": model.vocab_size,
            "seq-len": SEQ_LEN,
            "batch-size": candidate.batch_size,
            "fixed-compute": f"forward={forward}ns/param,backward={2 * forward}ns/param",
            "emulate": _emulation(self._link),
            "steps": VIRTUAL_STEPS,
            "runs-dir": folder / "runs",
        }
        words = [f"--{name}={value}" for name, value in options.items()]
        run_trainer(
            ["tests.studies.validation.virtual_time", "instrumented_trainer", *words], self._name
        )
        return folder / "runs"


def plans_of_grid(job: Job) -> list[Candidate]:
    """The grid. See [Note: what the grid leaves out]."""
    return [
        each
        for each in list_candidates(job, BATCH_SIZES)
        if each.prefetch == 0
        and not each.offload
        and each.tensor_parallel == 1
        and each.checkpointing != "selective"
    ]


def _spread(items: Sequence[T], count: int) -> list[T]:
    """At most `count` items, a fixed random selection in their order."""
    chosen = random.Random(0).sample(range(len(items)), min(count, len(items)))
    return [items[at] for at in sorted(chosen)]


def _emulation(link: Preset) -> str:
    rate, latency_ns = link.intra
    text = f"world_size={RANKS},bandwidth={rate:.0f}B/s,latency={latency_ns}ns"
    if link.inter is None:
        return text
    rate, latency_ns = link.inter
    nodes = f"gpus_per_node={link.gpus_per_node},inter_bandwidth={rate:.0f}B/s"
    return f"{text},{nodes},inter_latency={latency_ns}ns"


def _words(candidate: Candidate) -> str:
    """The settings in words, for tables and folders."""
    words = [
        f"batch {candidate.batch_size}",
        f"{candidate.blocks_per_unit} blocks",
        candidate.param_dtype,
        "reshard" if candidate.reshard_after_forward else "keep",
    ]
    if candidate.checkpointing != "none":
        words.append(f"{candidate.checkpointing} checkpointing")
    if candidate.replicas > 1:
        words.append(f"{candidate.replicas} replicas")
    return " ".join(words)
