"""`fsdp-inspect diagnose`: explain why a run hung, died or went wrong."""

import contextlib
import select
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fsdp_inspect.cli.advise import patch_file_of
from fsdp_inspect.cli.arguments import (
    JsonOption,
    RunArgument,
    open_run_argument,
    print_renderable,
    require_new_file,
)
from fsdp_inspect.cli.cluster import DaskOption, open_tasks, show_bars
from fsdp_inspect.store.schema import MANIFEST_FILE

if TYPE_CHECKING:
    from fsdp_inspect.diagnosis.diagnose import Diagnosis
    from fsdp_inspect.importing.message_labels import ModelParts
    from fsdp_inspect.parallel.tasks import Tasks
    from fsdp_inspect.run import Run

HEALTHY, PROBLEM, CANNOT_TELL = range(3)
SETTLE_S = 1.5
"""Time to wait for ranks that still write. The black box of a rank is saved each second."""
_LAST_SETTLE_S = 0.1
"""The same time if this command took long to start."""


def diagnose(  # noqa: PLR0913 - one argument an option
    run: RunArgument,
    as_json: JsonOption = False,
    brief: Annotated[
        bool, typer.Option("--brief", help="Show only the sentence and the next steps.")
    ] = False,
    decision: Annotated[
        bool,
        typer.Option(
            "--decide",
            help="For schedulers: print only what to do next. Exit codes: 0 continue, 10 restart, "
            "11 stop, 12 exclude a node, 2 cannot tell. --json names the nodes.",
        ),
    ] = False,
    attempt: Annotated[
        int | None,
        typer.Option(
            help="The start of an elastic job to diagnose, counted from 0. Default: the last one.",
            metavar="N",
            show_default=False,
        ),
    ] = None,
    at_end: Annotated[
        Path | None,
        typer.Option(
            "--at-end",
            hidden=True,
            help="For the end of a training: wait for ranks that still write, name the tool, and "
            "create this file.",
        ),
    ] = None,
    job: Annotated[
        int,
        typer.Option("--job", hidden=True, help="The descriptor of the launcher's process."),
    ] = -1,
    write: Annotated[
        Path | None,
        typer.Option(
            help="After an out-of-memory error, write the plans that would have fitted: the "
            "fastest one as plan.toml, the others as plan-2.toml and plan-3.toml. Next to each, "
            "the diff of the script that applies it, if one can be written: plan.patch.",
            metavar="FILE",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Of dumps: name the units from message sizes. A preset (llama-8b), or the "
            "config.json of a Hugging Face model or its folder.",
            metavar="MODEL",
        ),
    ] = None,
    dask: DaskOption = None,
) -> None:
    """Explain why a run hung, died or went wrong: the rank, the unit, the line of code.

    RUN can also be a folder of dumps of torch's flight recorder (`nccl_trace_rank_0`), so that no
    recorder is needed. Dumps have no units; with `--model`, they are inferred from the messages.

    RUN can also be the address of torch's debug server (`torch.distributed.debug`), such as
    `http://node0:25999`. It then asks each rank for its stacks and its flight recorder.

    It works while the job hangs, and after it was killed. It reads the files in the folder of each
    rank: the last collectives, the stacks of its threads, and its exit.

    After an out-of-memory error, it shows the live memory by category, unit and line of code, and
    the growth since the last complete step. It also proposes up to three plans that would have
    fitted, by simulation.

    With `--dask`, workers condense the ranks of a run that has not ended, and simulate the plans.
    Black boxes and stacks are small, so this command reads them itself.

    Exit codes: 0 healthy, 1 a problem, 2 cannot tell.

    Example: `fsdp-inspect diagnose runs/llama-1b`
    """
    import json

    from fsdp_inspect.diagnosis.decision import EXIT_CODES, decide
    from fsdp_inspect.diagnosis.diagnose import Status
    from fsdp_inspect.report.diagnosis import diagnosis_to_dict, render_diagnosis

    begun_s = time.monotonic()
    if at_end is not None:
        import fsdp_inspect.run  # noqa: F401 - loaded while the ranks still write

        _await_ranks(job, max(begun_s + SETTLE_S - time.monotonic(), _LAST_SETTLE_S))
    with open_tasks(dask) as connected, _as_run(run, model) as folder:
        tasks = show_bars(connected)
        opened = open_run_argument(folder, tasks, attempt)
        found = opened.diagnose(with_plans=False)
        if not brief or write is not None:
            found = _with_plans(opened, found, write, tasks)
    before = attempt if attempt in opened.source.attempts[:-1] else None
    decided = decide(found, opened.source) if as_json or decision else None
    if as_json and decided is not None:
        head = {"run_id": opened.id, "source": opened.manifest.source, "notes": list(opened.notes)}
        words = diagnosis_to_dict(found, attempt=before)
        answer = {**head, "decision": decided.to_dict(), **words}
        print(json.dumps(answer, indent=2, allow_nan=False))
    elif decided is not None:
        print(decided.sentence)
    else:
        if at_end is not None:
            print("fsdp_inspect: ", end="")
        has_notes = found.is_imported or found.status is Status.HEALTHY
        notes = opened.notes if has_notes else ()  # those of a problem are its evidence
        print_renderable(render_diagnosis(found, brief=brief, run=run, notes=notes, attempt=before))
        if at_end is not None:
            with contextlib.suppress(OSError):
                at_end.touch()  # no other process explains the same end
    if decision and decided is not None:
        raise typer.Exit(EXIT_CODES[decided.action])
    codes = {"healthy": HEALTHY, "problem": PROBLEM}
    raise typer.Exit(codes.get(found.status.value, CANNOT_TELL))


@contextlib.contextmanager
def _as_run(argument: str, model: str | None) -> Iterator[str]:
    """The run that RUN names; dumps of torch's flight recorder become a temporary run."""
    from fsdp_inspect.importing.debug_server import fetch_dumps, is_debug_server
    from fsdp_inspect.importing.flight_recorder import import_dumps, looks_like_dumps

    parts = None if model is None else parts_of_model(model)
    if is_debug_server(argument):
        with tempfile.TemporaryDirectory(prefix="fsdp-inspect-") as folder:
            dumps, target = Path(folder) / "dumps", Path(folder) / "debug-server"
            stacks = fetch_dumps(argument, dumps)
            import_dumps(dumps, target, name=argument, model=parts, stacks=stacks)
            yield str(target)
        return
    path = Path(argument)
    is_run = not path.exists() or (path / MANIFEST_FILE).exists()
    if is_run or not looks_like_dumps(path):
        if model is not None:
            raise typer.BadParameter(
                f"{argument!r} is not a folder of flight recorder dumps. Expected dumps: a run "
                "names its own units. Omit --model.",
                param_hint="--model",
            )
        yield argument
        return
    with tempfile.TemporaryDirectory(prefix="fsdp-inspect-") as folder:
        target = Path(folder) / (path.stem or "dumps")
        import_dumps(path, target, model=parts)
        yield str(target)


def parts_of_model(name: str) -> "ModelParts":
    """The parts of a preset or a Hugging Face model that units hold.

    Raises:
        ConfigError: There is no such model, or its architecture is unsupported.
    """
    from fsdp_inspect.importing.message_labels import ModelParts
    from fsdp_inspect.simulation.planning.transformer import load_model

    model, _ = load_model(name)
    names, head = model.module_names, model.head_shapes()
    norm = tuple(shape for shape in head if len(shape) == 1)
    last = ((names.norm, norm), (names.head, tuple(head[len(norm) :])))
    return ModelParts(
        blocks=names.blocks,
        num_blocks=model.num_layers,
        block_shapes=tuple(model.block_shapes()),
        first=(names.embedding, tuple(model.embedding_shapes())),
        last=tuple(part for part in last if part[1]),
    )


def _await_ranks(job: int, timeout_s: float) -> None:
    """Wait for ranks that still write, at most until the end of the job."""
    if job < 0:
        time.sleep(timeout_s)
    else:
        select.select([job], [], [], timeout_s)


def _with_plans(
    run: "Run", found: "Diagnosis", write: Path | None, tasks: "Tasks | None"
) -> "Diagnosis":
    """Search the plans that would have fitted, and write them to files."""
    from fsdp_inspect.diagnosis.diagnose import with_plans
    from fsdp_inspect.report.out_of_memory import name_plan_file

    first = str(write or "plan.toml")
    found = with_plans(
        found, run.source, name_file=lambda at: name_plan_file(first, at), tasks=tasks
    )
    plans = found.plans.plans if found.plans is not None else ()
    if write is not None and not plans:
        raise typer.BadParameter(
            "No plan to write. Expected a run that ran out of memory and plans that would have "
            "fitted. Run the command without --write to see why there is none.",
            param_hint="--write",
        )
    for at, each in enumerate(plans if write is not None else (), 1):
        path = Path(name_plan_file(first, at))
        patch = patch_file_of(path)
        require_new_file("--write", path)
        require_new_file("--write", patch)
        each.proposal.plan.dump(path)
        written = f"Wrote {path}"
        if each.change.diff:
            patch.write_text(f"{each.change.diff}\n", encoding="utf-8")
            written += f". To apply it: patch -p0 < {shlex.quote(str(patch))}"
        print(f"{written}.", file=sys.stderr)
    return found
