"""The tools: each one calls a `Run` method, and adds the origin of the numbers."""

import json
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from fsdp_inspect.analysis.provenance import measure_provenance
from fsdp_inspect.cli.assistant.run_folder import LentRuns, describe_entry
from fsdp_inspect.error_text import suggest
from fsdp_inspect.metrics import METRICS
from fsdp_inspect.quantities import parse_bytes_per_s, parse_time_ns
from fsdp_inspect.report.diagnosis import diagnosis_to_dict
from fsdp_inspect.results import Result, to_plain
from fsdp_inspect.run import Run

# --- The arguments of each tool, with the descriptions that an assistant reads.

Part = Annotated[
    str,
    Field(
        description="Return only this part of the result, in full if it fits: a path such as "
        "'units[0].passes'. The answer's `left_out` lists the paths that were shortened."
    ),
]
Rank = Annotated[int | None, Field(description="The rank. Default: the median rank.", ge=0)]


class Arguments(BaseModel):
    """Arguments of a tool; unknown ones are an error."""

    model_config = ConfigDict(extra="forbid")


class ListArguments(Arguments):
    """The page of a list of runs."""

    search: Annotated[
        str, Field(description="Only runs whose name, run id, model or tags contain this text.")
    ] = ""
    limit: Annotated[int, Field(ge=1, le=100, description="The most runs to return.")] = 20
    offset: Annotated[int, Field(ge=0, description="The number of newer runs to skip.")] = 0


class RunArguments(Arguments):
    """A run and the part of its result."""

    run: Annotated[str, Field(description="The name of the run, as list_runs gives it.")]
    part: Part = ""


class RankArguments(RunArguments):
    """A run and one of its ranks."""

    rank: Rank = None


class StepArguments(RankArguments):
    """A run, one of its ranks and one of its steps."""

    step: Annotated[
        int | None, Field(ge=0, description="One finished step. Default: the typical step.")
    ] = None


class UnitArguments(RankArguments):
    """A run, one of its ranks and one of its units."""

    unit: Annotated[
        str | None,
        Field(description="Only waits of this FSDP unit; '(root)' is the root."),
    ] = None


class CompareArguments(Arguments):
    """The runs to compare."""

    runs: Annotated[
        list[str],
        Field(min_length=2, max_length=20, description="The reference, then the other runs."),
    ]
    part: Part = ""


class SimulateArguments(RankArguments):
    """Changes of the recorded plan, and another network; null keeps the recorded setting."""

    wrap: Annotated[
        str | None, Field(description="Wrap policy: root, block, every:N or split.")
    ] = None
    forward_prefetch: Annotated[int | None, Field(ge=0, description="Units to prefetch.")] = None
    backward_prefetch: Annotated[int | None, Field(ge=0, description="Units to prefetch.")] = None
    reshard_after_forward: Annotated[
        bool | int | None,
        Field(description="For all units except the root: true, false, or a number of ranks."),
    ] = None
    param_dtype: Annotated[str | None, Field(description="Dtype of all-gathers.")] = None
    reduce_dtype: Annotated[str | None, Field(description="Dtype of reductions.")] = None
    world_size: Annotated[int | None, Field(ge=1, description="Number of ranks.")] = None
    replicas: Annotated[
        int | None, Field(ge=1, description="Replicas of the model (HSDP); 1: all ranks shard.")
    ] = None
    microbatches: Annotated[int | None, Field(ge=1, description="Per step.")] = None
    checkpointing: Annotated[
        Literal["none", "full"] | None, Field(description="Activation checkpointing.")
    ] = None
    bandwidth: Annotated[
        str | None, Field(description="Bus bandwidth of another network, such as '50GB/s'.")
    ] = None
    latency: Annotated[
        str | None, Field(description="Latency of another network, such as '20us'.")
    ] = None


class AdviseArguments(RunArguments):
    """Limits of a search for a better plan."""

    memory_limit: Annotated[
        str | None,
        Field(description="The peak must not exceed it, such as '80GiB'. Default: the device."),
    ] = None
    allow_dtypes: Annotated[
        bool, Field(description="Whether messages may become bfloat16, which changes numerics.")
    ] = False


class DefineArguments(Arguments):
    """The metrics to define."""

    names: Annotated[
        list[str],
        Field(min_length=1, max_length=50, description="Keys of results, such as 'exposed_ns'."),
    ]


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
    answer: Callable[[LentRuns, Any], dict[str, Any]]
    """Returns JSON values."""


def answer_list_runs(folder: LentRuns, given: ListArguments) -> dict[str, Any]:
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


def answer_compare(folder: LentRuns, given: CompareArguments) -> dict[str, Any]:
    """Compare runs with the first one."""
    runs = [folder.open(name) for name in given.runs]
    plain = runs[0].compare(*runs[1:]).to_dict()
    command = shlex.join(["fsdp-inspect", "compare", *map(_path, runs), "--json"])
    origins = [_origin(name, run) for name, run in zip(given.runs, runs, strict=True)]
    return {**_shown(plain, given.part), "origin": {"runs": origins, "command": command}}


def define_metrics(folder: LentRuns, given: DefineArguments) -> dict[str, Any]:
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

    def answer(folder: LentRuns, given: RunArguments) -> dict[str, Any]:
        run = folder.open(given.run)
        result = ask(run, given)
        plain = result.to_dict() if isinstance(result, Result) else to_plain(result)
        origin = _origin(given.run, run, is_predicted=is_predicted)
        if given.model_fields_set <= {"run", "part"}:
            words = _COMMANDS.get(name, f"show RUN {name}").split()
            given_run = [_path(run) if word == "RUN" else word for word in words]
            origin["command"] = shlex.join(["fsdp-inspect", *given_run])
        return {**_shown(plain, given.part), "origin": origin}

    return Tool(name, description, arguments, answer)


_COMMANDS = {
    **dict.fromkeys(("summary", "step_times"), "show RUN"),
    **dict.fromkeys(("diagnose", "drift"), "diagnose RUN"),
    **{name: f"{name} RUN" for name in ("advise", "simulate")},
    "logged_values": "store metrics RUN",
}
"""The command that shows the numbers of a tool; the others are sections of `show`."""


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


# --- Shorten a result to a size that an assistant can read, and list the parts that are left out.

MAX_CHARACTERS = 24_000
"""The most characters of a result as JSON, about 8,000 tokens."""
_LIMITS = ((200, 12), (50, 10), (20, 8), (10, 7), (8, 6), (5, 5), (3, 4), (2, 3), (0, 2), (0, 1))
"""Items of a list and levels of nesting to keep, in the order in which they are tried."""
_MOST_NAMED = 30
"""The most parts that are named as left out."""
_MOST_LETTERS = 2_000
"""The most characters of one text."""
_STEP = re.compile(r"([^.\[\]]+)|\[(\d{1,9})\]")
_PATH = re.compile(r"(?:[^.\[\]]+|\[\d{1,9}\])(?:\.[^.\[\]]+|\[\d{1,9}\])*")
"""A path of at least one step."""


@dataclass(frozen=True, slots=True)
class BoundedResult:
    """A result within the limit."""

    result: Any
    left_out: tuple[str, ...]
    """The parts that are shortened, each with its path and the number of items."""


def limit_result(value: Any, *, part: str = "") -> BoundedResult:
    """Shorten lists, texts and deep tables until the value fits; numbers stay exact.

    Args:
        value: JSON values.
        part: The path of the value, which begins the paths of the parts left out.
    """
    for most_items, most_levels in _LIMITS:
        pruning = _Pruning(most_items, most_levels)
        pruned = pruning.prune(value, part, 0)
        if len(json.dumps(pruned)) <= MAX_CHARACTERS:
            return BoundedResult(pruned, pruning.named())
    # Thousands of keys at the top level: no result of `Run` has them.
    return BoundedResult(None, (f"{part or 'the whole result'} is too large",))


def take_part(value: Any, part: str) -> Any:
    """The part of a result at a path such as `units[0].passes`; the empty path is the result.

    Raises:
        ValueError: There is no such part.
    """
    if part and not _PATH.fullmatch(part):
        raise ValueError(
            f"Invalid part {part[:200]!r}. Expected a path such as 'units[0].fqn'. Omit `part` for "
            "the whole result."
        )
    reached = ""
    for key, position in _STEP.findall(part):
        if position:
            if not isinstance(value, list) or int(position) >= len(value):
                raise ValueError(_no_part(part, reached, f"[{position}]", value))
            value, reached = value[int(position)], f"{reached}[{position}]"
        else:
            if not isinstance(value, dict) or key not in value:
                raise ValueError(_no_part(part, reached, key, value))
            value, reached = value[key], f"{reached}.{key}" if reached else key
    return value


def _no_part(part: str, reached: str, step: str, value: Any) -> str:
    where = f"{reached!r}" if reached else "The result"
    if isinstance(value, Mapping):
        known = suggest(step, list(value), what="keys")
    elif isinstance(value, list):
        known = f"It is a list of {len(value)} items."
    else:
        known = "It has no parts."
    return (
        f"Invalid part {part[:200]!r}: {where} has no {step[:100]!r}. Expected a path such as "
        f"'units[0].fqn'. {known}"
    )


@dataclass(slots=True)
class _Pruning:
    most_items: int
    most_levels: int
    left_out: list[str] = field(default_factory=list)

    def named(self) -> tuple[str, ...]:
        rest = len(self.left_out) - _MOST_NAMED
        more = (f"and {rest} more parts",) if rest > 0 else ()
        return (*self.left_out[:_MOST_NAMED], *more)

    def prune(self, value: Any, path: str, level: int) -> Any:
        if isinstance(value, str) and len(value) > _MOST_LETTERS:
            self.left_out.append(f"{path}: {_MOST_LETTERS:,} of {len(value):,} characters")
            return value[:_MOST_LETTERS]
        if not isinstance(value, dict | list) or not value:
            return value
        if level >= self.most_levels:
            self.left_out.append(f"{path}: {_count(value)}")
            return f"left out: {_count(value)}"
        if isinstance(value, dict):
            return {
                key: self.prune(item, f"{path}.{key}" if path else key, level + 1)
                for key, item in value.items()
            }
        if len(value) > self.most_items:
            self.left_out.append(f"{path}: {self.most_items} of {len(value)} items")
        return [
            self.prune(item, f"{path}[{at}]", level + 1)
            for at, item in enumerate(value[: self.most_items])
        ]


def _count(value: dict[str, Any] | list[Any]) -> str:
    return f"{len(value)} {'items' if isinstance(value, list) else 'keys'}"
