"""Describe the problem of a run: one sentence, the evidence, and what to do next."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fsdp_inspect.analysis.correctness import TrainingFault
from fsdp_inspect.analysis.loss_spikes import LossSpike
from fsdp_inspect.analysis.numerics import NonFinite, Numerics
from fsdp_inspect.diagnosis.activities import Activity, ActivityKind
from fsdp_inspect.diagnosis.diagnose import (
    Diagnosis,
    ProblemClass,
    RankState,
    Status,
    Unknown,
)
from fsdp_inspect.diagnosis.ends import EndKind, RankEnd, has_timed_out
from fsdp_inspect.diagnosis.process_signs import ProcessSigns, ProcessState
from fsdp_inspect.diagnosis.run_events import RunEvent, RunEventKind
from fsdp_inspect.diagnosis.waits import Wait
from fsdp_inspect.formatting import (
    MISSING,
    capitalize,
    format_attempts,
    format_bytes,
    format_ns,
    format_owner,
    format_ranks,
    format_ratio,
    format_unit,
    name_run,
    plural,
)
from fsdp_inspect.report.diagnosis_pictures import (
    MOST_CHANGES,
    pictures_to_dict,
    render_pictures,
)
from fsdp_inspect.report.layout import indented, new_table
from fsdp_inspect.report.out_of_memory import (
    describe_fitting_plans,
    describe_memory_at_failure,
    list_next_steps,
    out_of_memory_to_dict,
)
from fsdp_inspect.results import to_plain
from fsdp_inspect.store.reduction.collective_order import Difference, Issued
from fsdp_inspect.store.reduction.order_wording import (
    describe_difference,
    describe_issued,
    of_step,
    shorten_place,
)
from fsdp_inspect.store.reduction.out_of_memory_wording import describe_out_of_memory
from fsdp_inspect.trace.codes import NO_UNIT, EventKind
from fsdp_inspect.trace.numerics import Place
from fsdp_inspect.trace.run import StartStage

MOST_STATES = 16
"""The number of different states of ranks that the evidence lists."""
_MAX_FAILURE = 300
_ON_LAST_ATTEMPT = re.compile(r"fsdp-inspect (?!diagnose )[\w -]+ RUN")


@dataclass(frozen=True, slots=True)
class DiagnosisText:
    """A diagnosis in words."""

    sentence: str
    evidence: tuple[str, ...]
    next: tuple[str, ...]
    detail: str
    """The sentence without the words of the headline, to show below it."""
    earlier: str
    """The attempts before this one, with the command that diagnoses them, and those without
    data; empty: there are none."""


def describe_diagnosis(
    found: Diagnosis, *, run: str = "RUN", attempt: int | None = None
) -> DiagnosisText:
    """Describe a diagnosis in words: the problem, its evidence, and what to do.

    Args:
        found: The diagnosis.
        run: The run in commands.
        attempt: The attempt, if another one follows it: other commands show the last one.
    """
    nexts = list(_next(found))
    if attempt is not None:
        nexts = [
            step.replace("diagnose RUN", f"diagnose RUN --attempt {attempt}")
            for step in nexts
            if not _ON_LAST_ATTEMPT.search(step)
        ]
    steps = tuple(name_run(step, run) for step in nexts)
    sentence = _hedge(found, _sentence(found))
    fault = found.training
    detail = sentence if fault is None else f"{fault.why}{_line_of(fault)}"
    return DiagnosisText(sentence, tuple(_evidence(found)), steps, detail, _earlier(found, run))


def _earlier(found: Diagnosis, run: str) -> str:
    missing = f"This folder has no data of {format_attempts(found.missing_attempts)}."
    missing = missing if found.missing_attempts else ""
    if not found.earlier_attempts:
        return missing
    shown = ", ".join(f"{number} ({status})" for number, status in found.earlier_attempts)
    command = f"fsdp-inspect diagnose RUN --attempt {found.earlier_attempts[0][0]}"
    known = f"Attempts before this one: {shown}. Diagnose one: `{name_run(command, run)}`."
    return f"{known} {missing}".rstrip()


def _is_fact(found: Diagnosis) -> bool:
    """Whether no word of doubt is due. Values that are not finite were seen, not inferred."""
    return found.is_certain or found.problem is ProblemClass.NOT_FINITE


def _line_of(fault: TrainingFault) -> str:
    return f" Line: {shorten_place(fault.place)}." if fault.place else ""


def _hedge(found: Diagnosis, sentence: str) -> str:
    """The sentence as the most likely explanation, if the diagnosis is not certain."""
    is_hedged = found.problem is None or _is_fact(found) or "probably" in sentence.lower()
    is_hedged = is_hedged or sentence.startswith("Cannot tell")
    return sentence if is_hedged else f"Probably: {sentence}"


def render_diagnosis(
    found: Diagnosis,
    *,
    brief: bool = False,
    run: str = "RUN",
    notes: Sequence[str] = (),
    attempt: int | None = None,
) -> RenderableType:
    """Render a diagnosis for a terminal.

    Args:
        found: The diagnosis.
        brief: Only the sentence and the next step.
        run: The run in commands.
        notes: What the data cannot show, one sentence each.
        attempt: As for `describe_diagnosis`.
    """
    text = describe_diagnosis(found, run=run, attempt=attempt)
    style = {Status.HEALTHY: "bold green", Status.PROBLEM: "bold red"}.get(found.status, "bold")
    parts: list[RenderableType] = [Text(text.sentence, style=style)]
    if not brief and text.evidence:
        parts += ["", Text("Evidence", style="bold"), *map(_bullet, text.evidence)]
    if not brief and found.out_of_memory is None:
        parts.append(render_pictures(found))
    if not brief and found.out_of_memory is not None and found.plans is not None:
        fitting = describe_fitting_plans(found.out_of_memory, found.plans)
        parts += ["", Text("Plans that fit", style="bold"), *map(_bullet, fitting)]
    if text.next:
        parts += ["", Text("Next", style="bold"), *map(_bullet, text.next)]
    if text.earlier and not brief:
        parts += ["", Text(text.earlier)]
    if notes and not brief:
        parts += ["", *(Text(f"note: {note}", style="yellow") for note in notes)]
    return Group(*parts)


def render_states(found: Diagnosis) -> Table:
    """Render the step, phase, last collective and its line, and present line of each rank."""
    table = new_table("rank", "step", "phase", "last collective", "", "line", names=6)
    for state in found.states:
        table.add_row(
            str(state.rank),
            MISSING if state.last_step is None else str(state.last_step),
            MISSING if state.phase is None else state.phase.title,
            Text(MISSING if state.last is None else _issued_at(state.last, found)),
            "waits" if state.waits else state.end.kind.value,
            Text(_state_to_dict(state, found)["location"] or MISSING),
        )
    return table


def diagnosis_to_dict(found: Diagnosis, *, attempt: int | None = None) -> dict[str, Any]:
    """The diagnosis as JSON values: the answer, then the words, then the state of each rank.

    Args:
        found: The diagnosis.
        attempt: As for `describe_diagnosis`.
    """
    text = describe_diagnosis(found, attempt=attempt)
    return {
        "status": found.status.value,
        "class": None if found.problem is None else found.problem.value,
        "is_certain": found.is_certain,
        "ranks": list(found.ranks),
        "unit": found.unit,
        "phase": None if found.phase is None else found.phase.label,
        "step": found.step,
        "location": found.location or None,
        "sentence": text.sentence,
        "evidence": list(text.evidence),
        "next": list(text.next),
        "failure": found.failure or None,
        "earlier_attempts": [
            {"attempt": number, "status": status} for number, status in found.earlier_attempts
        ],
        "missing_attempts": [
            {"first": first, "last": last} for first, last in found.missing_attempts
        ],
        "events": [_event_to_dict(event) for event in found.events],
        "missing_ranks": list(found.missing_ranks),
        "loss_spikes": [to_plain(each) for each in found.loss_spikes],
        "drift": [to_plain(each) for each in found.drift],
        "long_steps": None if found.long_steps is None else to_plain(found.long_steps),
        "states": [_state_to_dict(state, found) for state in found.states],
        **pictures_to_dict(found),
        "out_of_memory": None
        if found.out_of_memory is None
        else out_of_memory_to_dict(found.out_of_memory, found.plans),
    }


def _state_to_dict(state: RankState, found: Diagnosis) -> dict[str, Any]:
    activity = state.activity
    last = state.last
    return {
        "rank": state.rank,
        "end": state.end.kind.value,
        "step": state.last_step,
        "phase": None if state.phase is None else state.phase.label,
        "last_collective": None if last is None else describe_issued(last, found.unit_names),
        "waits": state.waits,
        "idle_s": None if state.idle_s is None else round(state.idle_s, 3),
        "activity": None if activity is None else activity.kind.value,
        "process": None if state.process is None else to_plain(state.process),
        "location": None if activity is None or activity.frame is None else str(activity.frame),
        "failure": state.end.detail or None,
        "batches": state.num_batches,
        "no_batch_left": state.has_no_batch_left,
    }


def _event_to_dict(event: RunEvent) -> dict[str, Any]:
    return {
        "kind": event.kind.value,
        "step": event.step,
        "ranks": list(event.ranks),
        "unix_ns": event.unix_ns or None,
        "text": _describe_event(event),
    }


def _bullet(text: str) -> RenderableType:
    return indented(f"- {text}")


# --- the headline

_ENDED = "The recordings of all ranks ended normally"


def headline_diagnosis(found: Diagnosis) -> str:
    """The diagnosis in at most 12 words: the class, the ranks, the step."""
    if found.problem is None:
        if found.still_s is not None:
            return f"Nothing has moved for {_seconds(found.still_s)}."
        if found.unknown is Unknown.NO_BLACK_BOX and found.status is Status.HEALTHY:
            return f"{_ENDED}."
        is_healthy = found.status is Status.HEALTHY
        if is_healthy and (found.earlier_attempts or found.missing_attempts):
            return "No failure found in this attempt."
        return "No failure found." if is_healthy else "Cannot tell what went wrong."
    if found.training is not None:
        return found.training.headline
    who = format_ranks(found.ranks) if 0 < len(found.ranks) <= 2 else f"{len(found.ranks)} ranks"
    words = _HEADLINES[found.problem]
    if found.problem is ProblemClass.STOPPED and found.ranks:
        words = "SIGTERM ended {who} before the others"
    if found.problem is ProblemClass.NOT_FINITE and not found.ranks:
        words = "values are not finite"
    words = words.format(who=who if found.ranks else "a rank")
    text = f"{words}{_in_step(found)}."
    return capitalize(text if _is_fact(found) else f"probably, {text}")


_HEADLINES = {
    ProblemClass.ORDER_DIVERGED: "{who} issued collectives in another order",
    ProblemClass.SIZE_MISMATCH: "{who} used another size or dtype",
    ProblemClass.RANK_LATE: "{who} did not reach a collective",
    ProblemClass.UNEVEN_BATCHES: "{who} had no batch left",
    ProblemClass.RANK_DIED: "{who} died",
    ProblemClass.RANK_EXITED_EARLY: "{who} ended before the others",
    ProblemClass.FOREIGN_COLLECTIVE: "a collective outside FSDP has no counterpart on other ranks",
    ProblemClass.TRANSPORT_STUCK: "the transport between the ranks makes no progress",
    ProblemClass.HOST_DEADLOCK: "{who} waits for a lock",
    ProblemClass.SLOW_BUT_ALIVE: "the ranks issued no collective for a while",
    ProblemClass.OUT_OF_MEMORY: "{who} ran out of memory",
    ProblemClass.STOPPED: "the run was stopped from outside",
    ProblemClass.NOT_FINITE: "{who} has values that are not finite",
    ProblemClass.PRECISION_LOSS: "most updates change no stored parameter",
    ProblemClass.LOSS_SPIKE: "the loss rose and did not recover",
    ProblemClass.DRIFT: "the steps became slower and stayed slower",
}


# --- the sentence


def _sentence(found: Diagnosis) -> str:
    if found.difference is not None and found.problem is not ProblemClass.UNEVEN_BATCHES:
        return describe_difference(found.difference, found.unit_names)
    if found.problem is None:
        return _no_problem(found)
    return {
        ProblemClass.UNEVEN_BATCHES: _uneven,
        ProblemClass.RANK_DIED: _died,
        ProblemClass.OUT_OF_MEMORY: _out_of_memory,
        ProblemClass.RANK_EXITED_EARLY: _exited,
        ProblemClass.STOPPED: _stopped,
        ProblemClass.ORDER_DIVERGED: _circle if found.race is None else _raced,
        ProblemClass.TRANSPORT_STUCK: _transport,
        ProblemClass.NOT_FINITE: _not_finite,
        ProblemClass.PRECISION_LOSS: _precision_loss,
        ProblemClass.LOSS_SPIKE: _loss_spike,
        ProblemClass.DRIFT: _drift,
        ProblemClass.TRAINING: _wrong_training,
    }.get(found.problem, _late)(found)


def _wrong_training(found: Diagnosis) -> str:
    assert found.training is not None
    place = f" ({shorten_place(found.location)})" if found.location else ""
    return f"{found.training.sentence[:-1]}{place}. {found.training.why}"


def _exited(found: Diagnosis) -> str:
    return (
        f"{capitalize(format_ranks(found.ranks))} ended the recording{_in_step(found)}."
        f"{_waits(found)}{_skipped_batch(found)}"
    )


def _late(found: Diagnosis) -> str:
    if found.wait is None and any(state.start_stage for state in found.states):
        return f"The training has not begun. {_not_started(found)}."
    if found.wait is None:
        gone = [each.rank for each in found.states if each.end.kind is EndKind.VANISHED]
        was = "was" if len(gone) == 1 else "were"
        then = f" Then {format_ranks(gone)} {was} killed, or left silently." if gone else ""
        idle = _seconds(max((state.idle_s or 0.0 for state in found.states), default=0.0))
        return f"No rank has issued a collective for {idle}.{_common(found)}{then}"
    who = capitalize(format_ranks(found.ranks))
    what = describe_issued(found.wait.issued, found.unit_names)
    if found.late_s is not None:
        early = format_ranks([rank for rank in found.wait.waiting if rank not in found.ranks])
        return (
            f"{who} came {_seconds(found.late_s)} late to {what}{of_step(found.step)}: "
            f"{early} had waited until a time limit ({_clip(found.failure)})."
        )
    if found.ranks and not found.wait.absent and found.ranks[0] in found.wait.waiting:
        return f"{_all_wait(found, found.wait)}. {who} {_silent(found, found.ranks)}"
    if not found.ranks or (found.wait.absent and not {*found.ranks} <= {*found.wait.absent}):
        return _circle(found)
    first = found.first_culprit
    doing = "" if first is None else f" {_doing(first, found)}"
    rest = f"{_waits(found)}{_skipped_batch(found)}{_then_gone(first, found)}"
    never = "had not started" if _list_behind(found, found.ranks) else "never reached"
    return f"{who} {never} {what}{of_step(found.step)}.{doing}{rest}"


def _list_behind(found: Diagnosis, ranks: Sequence[int]) -> list[int]:
    """Those of some ranks whose device had not started what they had issued."""
    return [each.rank for each in found.states if each.has_unstarted and each.rank in ranks]


_STAGES = {
    0: "in training",
    StartStage.STARTED: "no process group",
    StartStage.GROUP_MADE: "a process group and no sharded model",
    StartStage.SHARDED: "sharding of the model has begun",
}


def _not_started(found: Diagnosis) -> str:
    """Describe ranks that stand before their first step: the stage and the work of each."""
    groups: dict[str, list[int]] = {}
    for state in found.states:
        doing = "" if state.activity is None else f", {_activity(state.activity)}"
        failed = f", failed with {_clip(state.end.detail)}" if state.end.detail else ""
        text = f"{_STAGES.get(state.start_stage, _STAGES[0])}{doing}{failed}"
        groups.setdefault(text, []).append(state.rank)
    return capitalize("; ".join(f"{format_ranks(each)}: {text}" for text, each in groups.items()))


def _then_gone(state: RankState | None, found: Diagnosis) -> str:
    """A sentence about a late rank that was the first to exit silently."""
    if state is None or state.end.kind is not EndKind.VANISHED or not state.end.unix_ns:
        return ""
    others = [each.end for each in found.states if each.rank not in found.ranks]
    is_first = all(
        each.kind is EndKind.RUNNING or each.unix_ns > state.end.unix_ns for each in others
    )
    how = f"left with {state.end.detail}" if state.end.detail else "was killed, or left silently"
    return f" Then it {how}." if is_first else ""


def _doing(state: RankState, found: Diagnosis) -> str:
    who = "It" if len(found.ranks) == 1 else f"Rank {state.rank}"
    has = "has been" if found.is_running else "had been"
    since = "" if state.idle_s is None else f" for {_seconds(state.idle_s)}"
    if state.activity is None and found.is_imported:
        return _last_seen(state, found)
    if state.activity is None:
        doing = _unseen(state, since)
        if _is_silent(state, found):
            doing = f"It {_silent(found, [state.rank])}"
        return f"{doing}{_paging(state.process)}"
    silent = f" It {_silent(found, [state.rank])}" if _is_silent(state, found) else ""
    return f"{who} {has} {_activity(state.activity)}{since}.{silent}{_paging(state.process)}"


def _is_silent(state: RankState, found: Diagnosis) -> bool:
    return not state.hang_seen and any(each.hang_seen for each in found.states)


_STATES = {
    ProcessState.STOPPED: "is stopped by a signal (SIGSTOP)",
    ProcessState.TRACED: "is stopped by a debugger",
    ProcessState.WAITS_FOR_DEVICE: "waits in the kernel for a device, such as a disk or a network "
    "file system",
    ProcessState.RUNS: "runs, and native code probably holds Python's lock",
    ProcessState.SLEEPS: "sleeps, probably in native code that holds Python's lock",
}


_NATIVE_STACK = (
    "See the native stack of that process: `py-spy dump --native --pid PID` on that rank's "
    "machine, or `gdb -p PID` with `thread apply all backtrace`."
)
_NEXT_FOR_PROCESS: Mapping[ProcessState | None, str] = {
    ProcessState.STOPPED: "Find out who stopped the process: Ctrl-Z, a scheduler that suspends "
    "jobs, or a debugger. `kill -CONT PID` on that rank's machine continues it.",
    ProcessState.TRACED: "Continue or detach the debugger on that rank's machine.",
    ProcessState.WAITS_FOR_DEVICE: "Look at the disks and mounts of that rank's machine, and at "
    "its kernel log (`dmesg`).",
    ProcessState.RUNS: _NATIVE_STACK,
    ProcessState.SLEEPS: _NATIVE_STACK,
    None: f"Look whether the process still runs: `ps -o pid,stat,wchan -p PID`. {_NATIVE_STACK}",
}


def _silent(found: Diagnosis, ranks: Sequence[int]) -> str:
    """The reason why ranks do not answer, from the state of their processes that was last seen."""
    states = {state.rank: state for state in found.states}
    signs = {None if each is None else each.state for each in (states[r].process for r in ranks)}
    verb, whose = ("does", "its process is") if len(ranks) == 1 else ("do", "their processes are")
    state = signs.pop() if len(signs) == 1 else None
    if len(ranks) == 1 and state is not None:
        return f"{verb} not answer: its process {_STATES[state]}."
    return f"{verb} not answer: {whose} stopped or gone, or native code holds Python's lock."


def _paging(process: ProcessSigns | None) -> str:
    """A sentence about the pages that a process reads from a disk; empty if they are few."""
    if process is None or not process.is_paging:
        return ""
    what = "its memory, or files that it maps, are read from a disk"
    if process.swap_bytes:
        what = f"its memory is read back from swap, {format_bytes(process.swap_bytes)} of it"
    return (
        f" Meanwhile, its process had {process.major_faults:,} major page faults in "
        f"{_seconds(process.seconds)}: {what}."
    )


def _last_seen(state: RankState, found: Diagnosis) -> str:
    is_alone = len(found.ranks) == 1
    whose, who = ("Its", "it") if is_alone else (f"Rank {state.rank}'s", f"rank {state.rank}")
    if state.last is None:
        return f"{whose} dump has no collective."
    if state.has_unstarted:
        return (
            f"{whose} device was in earlier work, which a dump does not show: {who} had issued "
            "collectives that the device had not started."
        )
    what = _issued_at(state.last, found)
    return f"{whose} last collective was {what}. A dump does not show its activity after that."


def _unseen(state: RankState, since: str) -> str:
    phase = f" in {state.phase.title}" if state.phase else ""
    return f"It was last seen{phase}; it issued nothing{since}, and its stack is unknown."


_DOING = {
    ActivityKind.BREAKPOINT: "in a breakpoint",
    ActivityKind.DATA: "waiting for the next batch",
    ActivityKind.CHECKPOINT: "saving or loading a checkpoint",
    ActivityKind.EVALUATION: "in an evaluation",
    ActivityKind.GARBAGE_COLLECTION: "collecting garbage",
    ActivityKind.COMPILE: "compiling",
    ActivityKind.SLEEP: "sleeping",
    ActivityKind.LOCK: "waiting for a lock, a queue or a thread",
    ActivityKind.NETWORK: "in a network request",
    ActivityKind.CHILD_PROCESS: "waiting for a child process",
    ActivityKind.FILE: "reading or writing a file or a pipe",
    ActivityKind.COLLECTIVE: "in a collective",
    ActivityKind.COMPARISON: "in the comparison of ranks before an optimizer step",
    ActivityKind.FOLLOWS: "waiting for rank 0 to begin to train",
    ActivityKind.CODE: "in its own code",
}


def _activity(activity: Activity) -> str:
    words = _DOING[activity.kind]
    if activity.kind is ActivityKind.COLLECTIVE and "init_process_group(" in activity.statement:
        words = "waiting for the other ranks to start"
    if activity.frame is None:
        return words
    statement = f" (`{activity.statement}`)" if activity.statement else ""
    return f"{words} at {shorten_place(str(activity.frame))}{statement}"


def _waits(found: Diagnosis) -> str:
    if found.wait is None:
        return ""
    count = _num_waiting(found)
    verb = "waits" if count == 1 else "wait"
    if not found.is_running:
        verb = "waited"
    ranks = plural(count, "rank")
    return f" {ranks} {verb} for {'it' if len(found.ranks) == 1 else 'them'}."


def _uneven(found: Diagnosis) -> str:
    who = capitalize(format_ranks(found.ranks))
    verb = "has" if len(found.ranks) == 1 else "have"
    rest = "the other ranks"
    if found.difference is not None:
        others = [
            rank
            for ranks, _ in found.difference.issued
            for rank in ranks
            if rank not in found.ranks
        ]
        rest = format_ranks(sorted(others))
    elif found.wait is not None:
        rest = format_ranks(found.wait.waiting)
    counts = {state.rank: state.num_batches or 0 for state in found.states}
    most = max(counts, key=lambda rank: counts[rank])
    more = counts[most] - counts[found.ranks[0]]
    return (
        f"{who} {verb} no batch left, while {rest} began step {found.step}: the ranks have "
        f"different numbers of batches. Rank {most} has had {more:,} more."
    )


def _skipped_batch(found: Diagnosis) -> str:
    """A sentence about a rank that has had as many batches as the ranks that wait for it."""
    late = found.first_culprit
    waiting = [found.state_of(rank) for rank in (found.wait.waiting if found.wait else ())]
    if late is None or not late.has_no_batch_left or late.num_batches is None:
        return ""
    is_skip = any(
        each.num_batches == late.num_batches and not each.has_no_batch_left
        for each in waiting
        if each is not None
    )
    if not is_skip:
        return ""
    return (
        " Its data loader has ended, and has given as many batches as on the ranks that wait: it "
        "has used a batch without a step."
    )


def _died(found: Diagnosis) -> str:
    return f"{_how_died(found)}{_possible_race(found)}"


def _possible_race(found: Diagnosis) -> str:
    if found.race is None:
        return ""
    effect = "Ranks may then exchange the data of different collectives, or wait forever."
    if found.problem is ProblemClass.RANK_DIED:
        effect = "Chance then decides which ranks crash."
    return (
        f" A possible cause is a race: {_issued_at(found.race, found)} had not finished, in a "
        f"process group that the training thread uses too. {effect}"
    )


def _how_died(found: Diagnosis) -> str:
    who = capitalize(format_ranks(found.ranks))
    first = found.first_culprit
    kind = None if first is None else first.end.kind
    where = _position(first)
    if kind is EndKind.FATAL_SIGNAL:
        at = f" at {shorten_place(found.location)}" if found.location else ""
        return f"{who} crashed in native code ({found.failure}){where}{at}.{_waited(found)}"
    if kind is EndKind.INTERRUPTED:
        return f"{who} was interrupted (SIGINT, such as Ctrl-C){where}.{_waited(found)}"
    if kind in (EndKind.EXCEPTION, EndKind.PEER_LOST):
        failed = _failed_with(found)
        return f"{who} failed with {failed}.{_waited(found)}{_before(found)}"
    if kind is EndKind.VANISHED:
        may_have_crashed = first is not None and first.end.may_have_crashed
        crashed = " crashed in native code," if may_have_crashed else ""
        killed = f"was killed,{crashed} or left with os._exit"
        if found.failure:
            return f"{who} left with {found.failure}{where}.{_waited(found)}"
        if found.oom_kills:
            killed = (
                f"was killed, probably for memory: the kernel killed "
                f"{plural(found.oom_kills, 'process', 'processes')} of this machine for memory"
            )
        return f"{who} {killed}{where}: it ended without an error.{_waited(found)}"
    is_one = len(found.ranks) == 1
    if any(state.start_stage for state in found.states):
        return _no_start_record(found)
    gone = "is gone" if is_one else "are gone"
    them = "it" if is_one else "them"
    return f"{who} {gone}: the other ranks lost the connection to {them}.{_waited(found)}"


def _no_start_record(found: Diagnosis) -> str:
    """Describe a start of which the records of some ranks are missing."""
    it = "it" if len(found.missing_ranks) == 1 else "each"
    has_group = any(state.start_stage > StartStage.STARTED for state in found.states)
    why = "has not imported torch" if not has_group else "trains already, in a run of its own"
    return (
        f"Cannot tell why the training has not begun, because {format_ranks(found.missing_ranks)} "
        f"left no record of the start: {it} was killed, left silently, {why}, or records on "
        f"another machine. {_not_started(found)}."
    )


def _before(found: Diagnosis) -> str:
    """A sentence about the standstill before the rank that the others waited for failed."""
    hang = next((e for e in found.events if e.kind is RunEventKind.HANG and not e.has_ended), None)
    first = found.first_culprit
    if hang is None or first is None or first.activity is None or first.waits:
        return ""
    return f" Before, nothing moved for {_seconds(hang.seconds or 0.0)}: it was " + (
        f"{_activity(first.activity)}."
    )


def _out_of_memory(found: Diagnosis) -> str:
    if found.out_of_memory is not None:
        who = capitalize(format_ranks(found.ranks))
        sentence = describe_out_of_memory(found.out_of_memory.record, found.unit_names)
        return f"{sentence} {who} failed.{_before(found)}"
    who = capitalize(format_ranks(found.ranks))
    failed = _failed_with(found)
    return f"{who} ran out of memory: {failed}.{_waited(found)}{_before(found)}"


def _failed_with(found: Diagnosis) -> str:
    """The error of the first culprit with its line."""
    state = found.first_culprit
    at = f" ({shorten_place(state.end.failed_at)})" if state and state.end.failed_at else ""
    return f"{_clip(found.failure)}{at}"


def _position(state: RankState | None) -> str:
    if state is None or state.step is None:
        return ""
    phase = f", last seen in {state.phase.title}" if state.phase else ""
    return f" in step {state.step}{phase}"


def _waited(found: Diagnosis) -> str:
    if found.wait is None:
        return ""
    what = describe_issued(found.wait.issued, found.unit_names)
    count, others = len(found.wait.waiting), _num_waiting(found) - len(found.wait.waiting)
    more = f", and {others} in other process groups" if others > 0 else ""
    return f" {plural(count, 'rank')} waited for it in {what}{more}."


def _num_waiting(found: Diagnosis) -> int:
    """The number of ranks that wait in any process group, without the culprits."""
    assert found.wait is not None
    waiting = {state.rank for state in found.states if state.waits} | {*found.wait.waiting}
    return len(waiting - {*found.ranks})


_STOPPED = {
    EndKind.SIGTERM: "were ended by SIGTERM",
    EndKind.VANISHED: "were killed",
    EndKind.INTERRUPTED: "were interrupted (SIGINT, such as Ctrl-C)",
}


def _stopped(found: Diagnosis) -> str:
    if found.ranks:
        was = "was" if len(found.ranks) == 1 else "were"
        return (
            f"{capitalize(format_ranks(found.ranks))} {was} ended by SIGTERM{_in_step(found)}, "
            "before another rank failed. A launcher, a scheduler, a user or the script sent it."
        )
    stopped = [state for state in found.states if state.end.kind in _STOPPED]
    kinds = {state.end.kind for state in stopped}
    how = _STOPPED[kinds.pop()] if len(kinds) == 1 else "were ended"
    if len(stopped) == 1:
        how = how.replace("were", "was")
    who = capitalize(format_ranks([state.rank for state in stopped]))
    return (
        f"{who} {how} from outside{_in_step(found)}, by a launcher, a scheduler or a user. Nothing "
        "recorded shows that a rank hung or failed before."
    )


def _circle(found: Diagnosis) -> str:
    assert found.wait is not None
    absent = found.state_of(found.wait.absent[0])
    other = "in another process group"
    if absent is not None and absent.waits and absent.last is not None:
        other = f"in {_issued_at(absent.last, found)}"
    elif absent is not None and absent.activity is not None:
        other = _activity(absent.activity)
    return (
        f"The ranks wait for each other: {format_ranks(found.wait.waiting)} in "
        f"{_issued_at(found.wait.issued, found)}{of_step(found.step)}, and "
        f"{format_ranks(found.wait.absent)} {other}."
    )


def _raced(found: Diagnosis) -> str:
    assert found.wait is not None
    return f"{_all_wait(found, found.wait)}, and none has finished.{_possible_race(found)}"


def _issued_at(issued: Issued, found: Diagnosis) -> str:
    """A collective, and the line that issued it if it is known."""
    at = "" if issued.place is None else f" ({shorten_place(str(issued.place))})"
    return f"{describe_issued(issued, found.unit_names)}{at}"


def _transport(found: Diagnosis) -> str:
    wait = found.wait
    assert wait is not None
    held = next((wait.held[rank] for rank in found.ranks if rank in wait.held), None)
    if held is None:
        return f"{_all_wait(found, wait)}, and none has finished: the transport makes no progress."
    who = capitalize(format_ranks(found.ranks))
    return (
        f"{who} {'has' if len(found.ranks) == 1 else 'have'} not left "
        f"{describe_issued(held, found.unit_names)}{of_step(found.step)}, which the other ranks "
        f"have finished: the transport to it makes no progress.{_waits(found)}"
    )


def _all_wait(found: Diagnosis, wait: Wait) -> str:
    count = len(wait.waiting)
    who = f"All {count} ranks are" if count == len(wait.members) else f"{count} ranks are"
    if count == 1:
        who = f"{capitalize(format_ranks(wait.waiting))} is"
    what = describe_issued(wait.issued, found.unit_names)
    return f"{who} in {what}{of_step(found.step)}{_for(found, wait.seconds)}"


def _not_finite(found: Diagnosis) -> str:
    assert found.numerics is not None
    first = found.numerics.first_non_finite
    assert first is not None
    if not first.is_exact:
        return _not_finite_since(first, found.numerics)
    of_unit = "parameters of no unit" if first.fqn is None else format_unit(first.fqn)
    who = format_ranks(first.ranks)
    on = f" on rank {first.rank}" if len(first.ranks) > 1 else ""
    counts = f"{first.count:,} of {first.total:,} values{on}"
    if first.place is Place.PARAMETER:
        return (
            f"The parameters of {of_unit} are not finite at the start of step {first.step} on "
            f"{who}: {counts}. In step {first.last_finite_step}, the numerics step before, "
            "parameters and optimizer states were finite."
        )
    return (
        f"The first values that are not finite are in step {first.step} on {who}: {counts} of the "
        f"{first.place.value} of {of_unit}."
    )


def _not_finite_since(first: NonFinite, numerics: Numerics) -> str:
    """Describe values that arose between two numerics steps, or that a rank did not record."""
    sentence = f"Values are not finite in step {first.step}."
    if first.last_finite_step is None:
        is_first = numerics.steps[0] == first.step
        why = "it is the first" if is_first else "ranks lack each earlier"
        sentence = f"{sentence} They arose in it or before it: {why} numerics step."
    else:
        sentence = (
            f"{sentence} They arose after step {first.last_finite_step}, the last numerics step "
            "with finite parameters and optimizer states. The unit and the rank are unknown, "
            "because such values spread within a step."
        )
    if first.loss_step is None:
        return sentence
    return f"{sentence} The first loss that is not finite is that of step {first.loss_step}."


def _precision_loss(found: Diagnosis) -> str:
    numerics = found.numerics
    assert numerics is not None
    stored = ", ".join(numerics.stored_dtypes)
    steps = plural(len(numerics.steps), "numerics step")
    return (
        f"{format_ratio(numerics.lost_ratio)} of the updates changed no stored parameter (median "
        f"of {steps}): they are smaller than the rounding of {stored}."
    )


def _loss_spike(found: Diagnosis) -> str:
    spike = found.loss_spikes[-1]
    other = "" if spike.peak is None else " Other data, or another loss, looks the same."
    return f"{_rise(spike)}, and did not recover.{other}{_first_moved(spike)}"


def _rise(spike: LossSpike) -> str:
    return f"The {spike.name} rose in step {spike.step}, from {spike.usual:.4g} to {_peak(spike)}"


def _peak(spike: LossSpike) -> str:
    return "a value that is not finite" if spike.peak is None else f"{spike.peak:.4g}"


def _first_moved(spike: LossSpike) -> str:
    """The unit whose gradient norm rose first; empty if no norm is known to have risen."""
    if not spike.moved:
        return ""
    first = spike.moved[0]
    norm = "not finite" if first.norm is None else f"{first.norm:.3g}"
    if len(spike.moved) == 1:
        return (
            f" The gradient norm of {format_owner(first.fqn)} rose first, in step "
            f"{first.step}: {norm}, usually {first.usual_norm:.3g}."
        )
    return (
        f" The gradient norms of {len(spike.moved)} units had risen in step {first.step}, most "
        f"that of {format_owner(first.fqn)}: {norm}, usually {first.usual_norm:.3g}. Which "
        "one rose first is unknown."
    )


def _drift(found: Diagnosis) -> str:
    change = next(each for each in found.drift if each.step == found.step)
    was, now = format_ns(change.before_ns), format_ns(change.after_ns)
    sentence = f"The steps became slower at step {change.step} and stayed slower: {was} to {now}."
    if change.is_gradual:
        sentence = (
            f"The steps became slower gradually: {was} before step {change.step}, {now} from it "
            "on (medians)."
        )
    if change.accounted_by:
        return f"{sentence} Accounted for by {'; '.join(change.accounted_by)}."
    if not change.are_parts_known:
        return f"{sentence} Too few detailed steps show which part of the step became slower."
    return f"{sentence} No part of the step accounts for it."


def _changes(found: Diagnosis) -> Iterator[str]:
    """The spikes of the loss and the drift that the sentence does not state."""
    for spike in found.loss_spikes[-MOST_CHANGES:]:
        if spike.falls_again:
            yield f"{_rise(spike)}, has not come back to it, and falls again since."
        if spike.recovered_at is not None:
            yield (
                f"{_rise(spike)}, and had recovered in step {spike.recovered_at}."
                f"{_first_moved(spike)}"
            )
    for change in found.drift[:MOST_CHANGES]:
        if found.problem is not ProblemClass.DRIFT or change.step != found.step:
            yield f"Step time: {change.sentence}"
        for words in change.coincident:
            yield f"At the same time as the change in step {change.step}: {words}."
    if found.long_steps is not None:
        yield found.long_steps.sentence


def _common(found: Diagnosis) -> str:
    kinds = {state.activity.kind for state in found.states if state.activity is not None}
    if len(kinds) != 1:
        first = found.first_culprit
        return "" if first is None else f" {_doing(first, found)}"
    state = next(state for state in found.states if state.activity is not None)
    assert state.activity is not None
    ranks = [each.rank for each in found.states if each.activity is not None]
    who = "All" if len(ranks) == len(found.states) else capitalize(format_ranks(ranks))
    has = "has" if len(ranks) == 1 else "have"
    return f" {who} {has if found.is_running else 'had'} been {_activity(state.activity)}."


def _no_problem(found: Diagnosis) -> str:
    if found.still_s is not None:
        return (
            f"Cannot tell whether the ranks hang: nothing has moved for {_seconds(found.still_s)}"
            f"{_in_step(found)}. The watchdog reports a hang later: see `--hang-after`."
        )
    if found.status is Status.HEALTHY and found.unknown is None:
        how = "The ranks make progress" if found.is_running else _ENDED
        return (
            f"{how}, and their collectives agree in kind, size and order. Speed is not judged here."
        )
    match found.unknown:
        case Unknown.MISSING_RANKS if found.wait is not None:
            what = describe_issued(found.wait.issued, found.unit_names)
            waiting = format_ranks(found.wait.waiting)
            return (
                f"Cannot tell which rank is late: {waiting} waited in {what}{of_step(found.step)}, "
                f"and {_without_record(found)}."
            )
        case Unknown.MISSING_RANKS if any(state.start_stage for state in found.states):
            return _no_start_record(found)
        case Unknown.MISSING_RANKS:
            return f"Cannot tell: {_without_record(found)}."
        case Unknown.IMPORTED:
            return "Cannot tell: an imported trace does not show how the ranks ended."
        case Unknown.TIME_OF_DUMP:
            return (
                "Cannot tell whether the job hung: the dumps do not state when they were written. "
                "The ranks issued the same collectives, as far as a dump shows."
            )
        case Unknown.NOT_WRITTEN:
            who = format_ranks(found.ranks)
            return (
                f"Cannot tell how {who} ended: a disk refused their files "
                f"({_clip(found.failure)}), "
                "so their missing end shows nothing."
            )
        case Unknown.NO_BLACK_BOX:
            ended = f"{_ENDED}. " if found.status is Status.HEALTHY else ""
            return f"{ended}Cannot tell whether the ranks agreed: the run has no black box."
        case _:
            lost = [each.rank for each in found.states if each.end.kind is EndKind.PEER_LOST]
            return (
                f"Cannot tell which rank failed first: {format_ranks(lost)} lost the connection, "
                f"or waited too long ({_clip(found.failure)})."
            )


# --- the evidence


def _further_faults(found: Diagnosis) -> Iterator[str]:
    for fault in found.other_faults:
        yield f"{fault.headline} {fault.why}{_line_of(fault)}"
    yield from (f"Damaged: {reason} Its events were not read." for reason in found.damage)
    for note in found.training_notes:
        yield f"Note: {note.sentence} {note.why}{_line_of(note)} {note.change}"


def _evidence(found: Diagnosis) -> Iterator[str]:
    if found.difference is not None:
        for ranks, issued in found.difference.issued:
            what = describe_issued(issued, found.unit_names)
            place = "" if issued.place is None else f" at {shorten_place(str(issued.place))}"
            inner = (
                f", called from {issued.place.inner}" if issued.place and issued.place.inner else ""
            )
            yield (
                f"{capitalize(format_ranks(ranks))} issued {what} as collective "
                f"{issued.sequence + 1} of the process group{place}{inner}."
            )
        yield _why_culprits(found)
    if len({event.kind for event in found.events}) > 1:
        yield f"In order: {'; '.join(map(_describe_event, found.events))}."
    if found.wait is not None:
        yield _describe_wait(found.wait, found)
    if found.out_of_memory is not None:
        yield from describe_memory_at_failure(found.out_of_memory)
    yield from _further_faults(found)
    yield from _describe_states(found)
    if found.problem is ProblemClass.PRECISION_LOSS and found.numerics is not None:
        for unit in sorted(found.numerics.units, key=lambda each: -(each.lost_ratio or 0.0))[:4]:
            yield (
                f"{format_owner(unit.fqn)}: {format_ratio(unit.lost_ratio)} of the updates "
                f"lost; parameters in {unit.parameter_dtype}, states in {unit.state_dtype}."
            )
    yield from _changes(found)
    if found.missing_ranks:
        yield f"{capitalize(_without_record(found))}."
    if found.oom_kills:
        yield f"The kernel killed {found.oom_kills} processes for memory during the run."


def _without_record(found: Diagnosis) -> str:
    """A clause, such as `rank 1 has no readable rank.json in this folder`."""
    what = "record" if found.is_imported else "readable rank.json"
    verb = "has" if len(found.missing_ranks) == 1 else "have"
    who = format_ranks(found.missing_ranks) if found.missing_ranks else "the other ranks"
    return f"{who} {verb} no {what} in this folder"


def _describe_event(event: RunEvent) -> str:
    """An event with its step, such as `in step 12, the collectives of the ranks first differed`."""
    step = "" if event.step is None else f"in step {event.step}, "
    who = format_ranks(event.ranks) if event.ranks else "the ranks"
    match event.kind:
        case RunEventKind.DESYNC:
            return f"{step}the collectives of the ranks first differed"
        case RunEventKind.NOT_FINITE:
            return f"{step}values that are not finite were first seen"
        case RunEventKind.OUT_OF_MEMORY:
            return f"{step}an allocation of {who} failed"
        case RunEventKind.HANG:
            moved_on = ", then the training moved on" if event.has_ended else ""
            return f"{step}nothing moved for {_seconds(event.seconds or 0.0)}{moved_on}"
    assert event.end is not None
    detail = f" ({_clip(event.end.detail)})" if event.end.detail else ""
    return f"{step}{who} {_describe_end(event.end)}{detail}"


def _why_culprits(found: Diagnosis) -> str:
    assert found.difference is not None
    if found.difference.is_unknown:
        return "The running digests of the ranks' collectives differ: see `trace.black_box`."
    if found.difference.is_race:
        return "No rank is at fault: every rank runs both threads."
    if not found.difference.culprits:
        return (
            "Cannot tell which of them is wrong: no set of ranks is the majority, and the step "
            "before does not decide it."
        )
    who = capitalize(format_ranks(found.difference.culprits))
    verb = "differs" if len(found.difference.culprits) == 1 else "differ"
    if found.difference.is_majority:
        return f"{who} {verb} from most ranks."
    return f"{who} {verb} from the step before; the other ranks do not."


def _describe_wait(wait: Wait, found: Diagnosis) -> str:
    what = describe_issued(wait.issued, found.unit_names)
    place = (
        "" if wait.issued.place is None else f", issued at {shorten_place(str(wait.issued.place))}"
    )
    since = "" if found.is_imported else f", for up to {_seconds(wait.seconds)} when last seen"
    text = f"{capitalize(format_ranks(wait.waiting))} waited in {what}{place}{since}."
    behind = _list_behind(found, wait.absent)
    if behind:
        text += f" The device of {format_ranks(behind)} had not started it."
    if others := [rank for rank in wait.absent if rank not in behind]:
        text += f" {capitalize(format_ranks(others))} had not issued it."
    return text


def _describe_states(found: Diagnosis) -> Iterator[str]:
    """The last state of each rank, the culprits first; ranks in the same state share a line."""
    if found.status is Status.HEALTHY or found.is_beside_collectives:
        return
    ranks: dict[str, list[int]] = {}
    for state in sorted(found.states, key=lambda each: each.rank not in found.ranks):
        ranks.setdefault(_describe_state(state, found), []).append(state.rank)
    ranks.pop("", None)  # an import may know nothing of a rank
    for text, each in [*ranks.items()][:MOST_STATES]:
        yield f"{capitalize(format_ranks(each))}: {text}."
    rest = [rank for each in [*ranks.values()][MOST_STATES:] for rank in each]
    if rest:
        yield f"{capitalize(format_ranks(rest))}: other states, see `states` of `--json`."


def _describe_state(state: RankState, found: Diagnosis) -> str:
    parts = []
    if state.activity is not None:
        parts.append(_activity(state.activity))
    if state.has_unstarted:
        parts.append("issued collectives that its device had not started")
    if state.last is not None and (state.waits or not state.has_unstarted):
        verb = "waiting in" if state.waits else "last issued"
        is_open = found.is_imported and not (state.waits or state.last.has_finished)
        parts.append(
            f"{verb} {describe_issued(state.last, found.unit_names)}{of_step(state.last.step)}"
            f"{', which the dump calls unfinished' if is_open else ''}"
        )
    if state.idle_s is not None and not state.waits:
        parts.append(f"nothing for {_seconds(state.idle_s)}")
    if state.has_no_batch_left:
        parts.append("its data loader has ended")
    if not found.is_imported:
        parts.append(_describe_end(state.end))
    is_measured = state.end.kind is EndKind.OUT_OF_MEMORY and found.out_of_memory is not None
    if state.end.detail and state.end.kind is not EndKind.PEER_LOST and not is_measured:
        parts.append(_clip(state.end.detail))
    return "; ".join(parts)


def _describe_end(end: RankEnd) -> str:
    if end.kind is not EndKind.PEER_LOST or not has_timed_out(end.detail):
        return _END[end.kind]
    limit = _LIMIT.search(end.detail)
    return f"waited{f' {_seconds(int(limit[1]) / 1000)}' if limit else ''} in vain for another rank"


_LIMIT = re.compile(r"(\d+) ?(ms|milliseconds)\b")
_END = {
    EndKind.RUNNING: "still running",
    EndKind.COMPLETE: "ended the recording",
    EndKind.EXCEPTION: "ended with an exception",
    EndKind.OUT_OF_MEMORY: "ran out of memory",
    EndKind.PEER_LOST: "lost another rank",
    EndKind.FATAL_SIGNAL: "crashed in native code",
    EndKind.SIGTERM: "ended by SIGTERM",
    EndKind.INTERRUPTED: "interrupted (SIGINT)",
    EndKind.VANISHED: "exited silently",
    EndKind.UNKNOWN: "its end is unknown",
}


# --- what to do


def _complete_data(found: Diagnosis) -> Iterator[str]:
    missing = format_ranks(found.missing_ranks)
    if found.unknown is Unknown.IMPORTED:
        yield (
            "Diagnose what shows the end: the folder of a run that fsdp_inspect.Recorder wrote, or "
            "a folder with the dumps of torch's flight recorder."
        )
    elif not found.missing_ranks or found.status is Status.HEALTHY:
        return
    elif found.is_imported:
        yield f"Import the dumps again, with those of {missing}."
    else:
        yield (
            f"Copy the folders of {missing} into the run, and run `fsdp-inspect diagnose RUN` "
            "again."
        )


def _next(found: Diagnosis) -> Iterator[str]:
    yield from _complete_data(found)
    if found.out_of_memory is not None:
        yield from list_next_steps(found.out_of_memory, found.plans)
        return
    if found.difference is not None and found.difference.is_race:
        yield _OWN_GROUP
        yield from _about_weights(found)
        return
    if found.race is not None:
        verb = "crashes" if found.problem is ProblemClass.RANK_DIED else "hangs"
        yield f"{_OWN_GROUP} If the run then {verb} again, the race is not the cause."
    if found.training is not None:
        yield from dict.fromkeys(each.change for each in (found.training, *found.other_faults))
    yield from _next_for_problem(found)
    yield from _about_weights(found)
    yield from _next_for_rank(found)
    if found.problem is ProblemClass.NOT_FINITE and not _is_exact(found):
        yield (
            "To find the step, the unit and the rank, start from the last checkpoint before, and "
            "record with --numerics-every 1 (numerics_every=1)."
        )
    if found.unknown is Unknown.TIME_OF_DUMP:
        yield (
            "Ranks that make progress can leave the same dump: dump again after a minute, and "
            "compare. With FSDP Inspect's recorder, the answer names units, steps and stacks."
        )
    if found.unknown is Unknown.NOT_WRITTEN:
        yield (
            "Look at the exit code of the launcher. Free space on this disk, or record on another "
            "one."
        )
    if found.unknown is Unknown.NO_BLACK_BOX:
        yield "Record the training again with this version, which writes a black box."


def _next_for_problem(found: Diagnosis) -> Iterator[str]:
    """Next steps that follow from the problem alone."""
    difference = found.difference
    is_size = found.problem is ProblemClass.SIZE_MISMATCH
    if is_size and difference is not None and difference.usual.unit == NO_UNIT:
        yield (
            "Give the tensor of that line the same size and dtype on all ranks: pad it, or gather "
            "the sizes first."
        )
    elif found.problem is ProblemClass.OUT_OF_MEMORY and not found.has_memory:
        yield (
            "The run failed before its memory was recorded. Record a smaller batch that fits: of "
            "that run, `show` names the memory by unit and category, and `advise --memory-limit "
            "SIZE` finds plans."
        )
    elif found.problem is ProblemClass.ORDER_DIVERGED and _is_of_steps(found):
        yield "Decide on all ranks together whether a backward or an update is left out."
    elif found.problem is ProblemClass.ORDER_DIVERGED and (outside := _issued_outside(found)):
        where = " and ".join(shorten_place(each) for each in outside)
        yield (
            f"Let all ranks issue the collective of {where} at the same point of the step, or let "
            "none issue it: look for a condition on the rank or its data."
        )
        yield _ON_DESYNC
    elif found.problem is ProblemClass.FOREIGN_COLLECTIVE and _is_point_to_point(found):
        yield "Look for the send or the receive that has no counterpart on the other rank."
    elif found.problem is ProblemClass.FOREIGN_COLLECTIVE and found.is_circle:
        yield (
            "Issue these collectives in the same order on all ranks: each rank waits in the first "
            "of its own order. If a rank never calls one of them, look for a condition on the rank."
        )
    elif found.problem is not None:
        yield from _NEXT.get(found.problem, ())


def _issued_outside(found: Diagnosis) -> list[str]:
    """The lines of the differing collectives that no unit issued."""
    issued = () if found.difference is None else found.difference.issued
    lines = [str(each.place) for _, each in issued if each.unit == NO_UNIT and each.place]
    return list(dict.fromkeys(lines))


def _is_point_to_point(found: Diagnosis) -> bool:
    """Whether a rank's last collective is a send or a receive."""
    lasts = [state.last for state in found.states if state.last is not None]
    return any(last.kind == EventKind.POINT_TO_POINT for last in lasts)


def _is_of_steps(found: Diagnosis) -> bool:
    """Whether the ranks issued the same collective in different steps."""
    return found.difference is not None and found.difference.difference is Difference.STEP


def _about_weights(found: Diagnosis) -> Iterator[str]:
    """What follows for the weights, if collectives of different tensors have finished."""
    difference = found.difference
    if difference is None or not difference.num_since or _is_of_steps(found):
        return
    since = max(issued.step for _, issued in difference.issued)
    if all(state.step is not None and state.step <= since for state in found.states):
        yield (
            f"No rank has ended step {since}. If no optimizer stepped in it after the difference, "
            "the weights from before it are right."
        )
    else:
        yield "Do not use the weights of this run: results since that step are wrong."


def _next_for_rank(found: Diagnosis) -> Iterator[str]:
    """Next steps that follow from the state of the first culprit."""
    state = found.first_culprit
    if found.late_s is not None:
        yield (
            "Look at what that rank does before this collective. To see its stacks, record with "
            "--hang-after SECONDS (hang_after_s) well below that time limit."
        )
    if "DataLoader worker" in found.failure and "Original Traceback" not in found.failure:
        yield (
            "Look for the end of the data loader's worker: the kernel may have killed it for "
            "memory. Use fewer workers, or smaller batches."
        )
    if found.problem is ProblemClass.RANK_DIED:
        if found.failure.startswith("SystemExit"):
            yield "Find the call of sys.exit: Python prints no traceback for it."
        else:
            yield _NEXT_FOR_END.get(state.end.kind if state else EndKind.UNKNOWN, _READ_LOG)
    if state is None:
        return
    if found.problem is ProblemClass.RANK_LATE and state.activity is None and state.process:
        yield _NEXT_FOR_PROCESS[state.process.state]
    if found.problem is ProblemClass.RANK_LATE and state.activity is not None:
        yield from _NEXT_FOR.get(state.activity.kind, ())
    if state.process is not None and state.process.is_paging:
        yield (
            "Free host memory on that rank's machine, or give it more: pages that it reads from a "
            "disk take 0.1 ms or more each."
        )


def _is_exact(found: Diagnosis) -> bool:
    """Whether the numerics show where the first non-finite values arose."""
    first = None if found.numerics is None else found.numerics.first_non_finite
    return first is not None and first.is_exact


_ON_DESYNC = "Stop at the next such step with Recorder(on_desync='raise')."
_NEXT: dict[ProblemClass, tuple[str, ...]] = {
    ProblemClass.ORDER_DIVERGED: (
        "Make every rank run the same units in the same order: a branch that depends on the data "
        "or the rank must be taken by all ranks, or call the unit on dummy input.",
        _ON_DESYNC,
    ),
    ProblemClass.SIZE_MISMATCH: (
        "Compare the model and the dtypes of the ranks: they must build the same model.",
    ),
    ProblemClass.UNEVEN_BATCHES: (
        "Give all ranks equally many batches: DistributedSampler(drop_last=True), or stop all "
        "ranks at the smallest number.",
    ),
    ProblemClass.RANK_EXITED_EARLY: (
        "Find the condition on which that rank left the training loop before the others.",
    ),
    ProblemClass.FOREIGN_COLLECTIVE: (
        "All ranks of a process group must call each of its collectives: look for a call under a "
        "condition on the rank.",
    ),
    ProblemClass.TRANSPORT_STUCK: (
        "Look at the network: links, firewalls, NCCL_DEBUG=INFO, and the driver's log.",
    ),
    ProblemClass.HOST_DEADLOCK: ("Look at the stacks of all threads in stacks.txt.",),
    ProblemClass.OUT_OF_MEMORY: (
        "Show the memory by unit and category: `fsdp-inspect show RUN memory`.",
        "Find a plan that needs less: `fsdp-inspect advise RUN --details`.",
    ),
    ProblemClass.NOT_FINITE: ("Show all units: `fsdp-inspect show RUN numerics`.",),
    ProblemClass.PRECISION_LOSS: (
        "Store the parameters in float32, and compute in bfloat16: "
        "MixedPrecisionPolicy(param_dtype=torch.bfloat16), without model.to(torch.bfloat16).",
        "Ignore this if the optimizer rounds stochastically, or keeps its own copy of the "
        "parameters in float32.",
    ),
    ProblemClass.LOSS_SPIKE: (
        "Look at the batches of these steps, the learning rate and the gradient clipping. If the "
        "data or the loss changed there on purpose, ignore this.",
        "Otherwise, start again from the last checkpoint before, and record with numerics_every=1.",
    ),
    ProblemClass.DRIFT: (
        "Compare steps before and after in the dashboard's Timeline: `fsdp-inspect app RUN`.",
    ),
    ProblemClass.STOPPED: ("Read the log of the launcher or the scheduler.",),
}
_OWN_GROUP = (
    "Give the background thread a process group of its own, such as dcp.async_save(..., "
    "process_group=dist.new_group(backend='gloo'))."
)
_ON_ONE_RANK = (
    "Find out why that line takes so long on that rank. If it has to, give the process group a "
    "longer timeout: init_process_group(timeout=...)."
)
_READ_LOG = "Read the end of the log of a failed rank."
_NEXT_FOR_END: dict[EndKind, str] = {
    EndKind.EXCEPTION: "Read the whole traceback at the end of that rank's log.",
    EndKind.VANISHED: (
        "Look for what ended it: the kernel's log (dmesg), the log of the launcher or the "
        "scheduler, and calls of os._exit in the script."
    ),
}
_NEXT_FOR: dict[ActivityKind, tuple[str, ...]] = {
    ActivityKind.DATA: (
        "Look at the data loader of that rank: its workers, its files and its network.",
    ),
    ActivityKind.CHECKPOINT: (
        "Save on all ranks together, or let all ranks wait in a barrier with a long timeout.",
    ),
    ActivityKind.EVALUATION: ("Evaluate on all ranks, or let the others wait for it.",),
    ActivityKind.BREAKPOINT: ("Leave the debugger, or remove the breakpoint.",),
    ActivityKind.CODE: (_ON_ONE_RANK,),
    ActivityKind.SLEEP: (_ON_ONE_RANK,),
    ActivityKind.FILE: (
        _ON_ONE_RANK,
        "Look at the file system of that rank's machine, or at the other end of the pipe.",
    ),
    ActivityKind.NETWORK: (_ON_ONE_RANK, "Give the request a timeout."),
    ActivityKind.CHILD_PROCESS: (_ON_ONE_RANK, "Look at the child process on that machine."),
    ActivityKind.COMPILE: (
        "Compile on all ranks alike: look for shapes or code that differ on that rank.",
    ),
    ActivityKind.GARBAGE_COLLECTION: (
        "Call gc.disable() and collect on all ranks in the same step.",
    ),
}


# --- numbers and text


def _in_step(found: Diagnosis) -> str:
    return "" if found.step is None else f" in step {found.step}"


def _for(found: Diagnosis, seconds: float) -> str:
    """A duration in words; empty for a dump, which does not show it."""
    return "" if found.is_imported else f" for {_seconds(seconds)}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def _clip(text: str) -> str:
    """The text on one line and at most `_MAX_FAILURE` long, without the stack of a worker."""
    head, stack, tail = text.partition("Original Traceback (most recent call last):")
    if stack and tail.strip():
        text = f"{head.strip().rstrip('.')}: {tail.strip().splitlines()[-1].strip()}"
    line = " ".join(text.split()).rstrip(".")
    return line if len(line) <= _MAX_FAILURE else f"{line[:_MAX_FAILURE]}..."
