"""The tools: each one calls a `Run` method, and adds the origin of the numbers."""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fsdp_inspect.analysis.provenance import measure_provenance
from fsdp_inspect.cli.assistant.arguments import (
    AdviseArguments,
    Arguments,
    CompareArguments,
    DefineArguments,
    ListArguments,
    RankArguments,
    RunArguments,
    SimulateArguments,
    StepArguments,
    UnitArguments,
)
from fsdp_inspect.cli.assistant.bounded import limit_result, take_part
from fsdp_inspect.cli.assistant.run_folder import RunFolder, describe_entry
from fsdp_inspect.error_text import suggest
from fsdp_inspect.metrics import METRICS
from fsdp_inspect.quantities import parse_bytes_per_s, parse_time_ns
from fsdp_inspect.report.diagnosis import diagnosis_to_dict
from fsdp_inspect.results import Result, to_plain
from fsdp_inspect.run import Run

_PLAN_CHANGES = (
    "wrap", "forward_prefetch", "backward_prefetch", "reshard_after_forward", "param_dtype",
    "reduce_dtype", "world_size", "replicas", "microbatches", "checkpointing",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool of the server."""

    name: str
    description: str
    arguments: type[Arguments]
    answer: Callable[[RunFolder, Any], dict[str, Any]]
    """Returns JSON values."""


def answer_list_runs(folder: RunFolder, given: ListArguments) -> dict[str, Any]:
    """List the runs of the folder, newest first."""
    entries = folder.entries()
    if given.search:
        entries = [entry for entry in entries if _matches(entry, given.search.casefold())]
    page = entries[given.offset : given.offset + given.limit]
    return {
        "num_runs": len(entries),
        "offset": given.offset,
        "runs": [describe_entry(entry, folder.path) for entry in page],
    }


def _matches(entry: Any, text: str) -> bool:
    manifest = entry.manifest
    words = [entry.id]
    if manifest is not None:
        words += [manifest.run_id, manifest.name, manifest.model.class_name, *manifest.tags]
    return any(text in word.casefold() for word in words)


def answer_compare(folder: RunFolder, given: CompareArguments) -> dict[str, Any]:
    """Compare runs with the first one."""
    runs = [folder.open(name) for name in given.runs]
    plain = runs[0].compare(*runs[1:]).to_dict()
    command = shlex.join(["fsdp-inspect", "compare", *map(_path, runs), "--json"])
    origins = [_origin(name, run) for name, run in zip(given.runs, runs, strict=True)]
    return {**_shown(plain, given.part), "origin": {"runs": origins, "command": command}}


def define_metrics(folder: RunFolder, given: DefineArguments) -> dict[str, Any]:
    """Define metrics by their keys in results."""
    unknown = [name for name in given.names if name not in METRICS]
    if unknown:
        raise ValueError(
            f"Unknown metric {unknown[0][:100]!r}. Expected a key of a result that is a metric, "
            f"such as 'exposed_ns'. {suggest(unknown[0], list(METRICS), what='metrics')}"
        )
    return {name: to_plain(METRICS[name]) for name in given.names}


def _simulate(run: Run, given: SimulateArguments) -> Result:
    changes = {name: getattr(given, name) for name in _PLAN_CHANGES}
    return run.simulate(
        bandwidth=_quantity("bandwidth", given.bandwidth, parse_bytes_per_s, "50GB/s"),
        latency_ns=_quantity("latency", given.latency, parse_time_ns, "20us"),
        rank=given.rank,
        **{name: value for name, value in changes.items() if value is not None},
    )


def _quantity(
    name: str, text: str | None, parse: Callable[[str], float | None], example: str
) -> float | None:
    value = None if text is None else parse(text)
    if value is None and text is not None:
        raise ValueError(
            f"Invalid {name} {text[:100]!r}. Expected a number with a unit, such as {example!r}. "
            "Change the argument."
        )
    return value


def _of_run(
    name: str,
    description: str,
    ask: Callable[[Run, Any], Any],
    *,
    arguments: type[RunArguments] = RunArguments,
    is_predicted: bool = False,
) -> Tool:
    """A tool with the result of one method of one run."""

    def answer(folder: RunFolder, given: RunArguments) -> dict[str, Any]:
        run = folder.open(given.run)
        result = ask(run, given)
        plain = result.to_dict() if isinstance(result, Result) else to_plain(result)
        origin = _origin(given.run, run, is_predicted=is_predicted)
        if given.model_fields_set <= {"run", "part"}:
            origin["command"] = shlex.join(["fsdp-inspect", _COMMANDS.get(name, name), _path(run)])
        return {**_shown(plain, given.part), "origin": origin}

    return Tool(name, description, arguments, answer)


_COMMANDS = {"step_times": "summary", "drift": "diagnose", "logged_values": "metrics"}
"""The command that shows the numbers of a tool, if its name is not the tool's."""


def _shown(plain: Any, part: str) -> dict[str, Any]:
    bounded = limit_result(take_part(plain, part), part=part)
    shown: dict[str, Any] = {"result": bounded.result}
    if bounded.left_out:
        shown["left_out"] = list(bounded.left_out)
    return shown


def _origin(name: str, run: Run, *, is_predicted: bool = False) -> dict[str, Any]:
    """The origin of the numbers: source, method, steps and rank."""
    known = measure_provenance(run.source)
    origin: dict[str, Any] = {
        "run": name,
        "run_id": run.id,
        "source": run.manifest.source,
        "methods": known.methods,
        "memory": known.memory,
        "status": run.status.value,
        "typical_step_of": {
            "rank": run.median_rank,
            "num_timed_steps": len(run.steps.timed),
        },
        "notes": list(run.notes),
    }
    if is_predicted:
        origin["predicted_from"] = origin["source"]
        origin["source"] = "predicted"
    return origin


def _path(run: Run) -> str:
    return str(getattr(run.source.source, "path", run.id))


TOOLS: Mapping[str, Tool] = {
    tool.name: tool
    for tool in (
        Tool(
            "list_runs",
            "List the recorded FSDP runs, newest first, with status, model and world size. The "
            "other tools take the name of a run from here.",
            ListArguments,
            answer_list_runs,
        ),
        _of_run(
            "summary",
            "Why is this run slow? The verdict (what limits the step, why, what to try next), the "
            "typical step time, exposed communication, overlap and peak memory. Begin here.",
            lambda run, _: run.summary(),
        ),
        _of_run(
            "diagnose",
            "Why did a run hang, die, run out of memory, slow down or stop learning? The class of "
            "the problem, the rank, the unit, the line of code, the evidence and the next steps; "
            "or that the run is healthy.",
            lambda run, _: diagnosis_to_dict(run.diagnose()),
        ),
        _of_run(
            "breakdown",
            "The parts of a step, which add up to it, and the causes of its exposed waits.",
            lambda run, given: run.breakdown(rank=given.rank, step=given.step),
            arguments=StepArguments,
        ),
        _of_run(
            "exposed",
            "The exposed communication by unit, collective, phase, mesh dimension and cause, with "
            "the recorded collectives as evidence; prefetch; bandwidth.",
            lambda run, given: run.exposed(unit=given.unit, rank=given.rank),
            arguments=UnitArguments,
        ),
        _of_run(
            "units",
            "The cost of each FSDP unit in the typical step: collectives, copies, compute.",
            lambda run, given: run.units(rank=given.rank),
            arguments=RankArguments,
        ),
        _of_run(
            "memory",
            "The peak memory by unit, phase and category, the limit of the device, and growth.",
            lambda run, given: run.memory(rank=given.rank),
            arguments=RankArguments,
        ),
        _of_run(
            "ranks",
            "The times and the lateness of each rank, and the straggler with its cost, if any.",
            lambda run, _: run.ranks(),
        ),
        _of_run(
            "step_times",
            "The step time over all finished steps of the median rank, and its spread.",
            lambda run, _: run.step_times(),
        ),
        _of_run(
            "drift",
            "The steps at which the step time changes, and what changed with it.",
            lambda run, _: run.drift(),
        ),
        _of_run(
            "lifetime",
            "The wall time of the run by phase, over all restarts, and its goodput.",
            lambda run, given: run.lifetime(rank=given.rank),
            arguments=RankArguments,
        ),
        _of_run(
            "logged_values",
            "The numbers that the training loop logged, such as the loss, by name.",
            lambda run, _: dict(run.scalars()),
        ),
        _of_run(
            "numerics",
            "Gradient norms, values that are not finite, and updates lost to rounding; null if the "
            "run recorded none.",
            lambda run, given: run.numerics(),
        ),
        _of_run(
            "advise",
            "Suggest changes with predicted gain, memory cost, risk and code. First problems that "
            "no sharding plan can fix, then plans by gain.",
            lambda run, given: run.advise(given.memory_limit, allow_dtypes=given.allow_dtypes),
            arguments=AdviseArguments,
            is_predicted=True,
        ),
        _of_run(
            "simulate",
            "Predict the step time and the peak memory under another plan or on another network, "
            "with the error of the self-check on the recorded plan.",
            _simulate,
            arguments=SimulateArguments,
            is_predicted=True,
        ),
        Tool(
            "compare",
            "Compare runs with the first one: settings, then times judged against noise, then "
            "memory by unit.",
            CompareArguments,
            answer_compare,
        ),
        Tool(
            "define_metrics",
            "The definition, the unit and the better direction of metrics in results.",
            DefineArguments,
            define_metrics,
        ),
    )
}
"""All tools by name."""
