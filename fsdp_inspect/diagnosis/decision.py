"""Decide what a scheduler does after a run: restart it, stop, exclude a node, or let it continue.

| finding | decision |
|---|---|
| the device of a rank failed (ECC, NVLink, fell off the bus) | exclude its node |
| ranks of one node of several were at fault in two starts in a row, without an error | exclude it |
| the same error in two starts in a row, or out of memory | stop |
| an error of the script, other collectives, uneven batches, a deadlock, a wrong training | stop |
| an error of files or of the network, such as `ConnectionError` | restart |
| the kernel killed a rank for memory | stop |
| a rank was killed or crashed, the network stands, the job was ended from outside | restart |
| slow, or the step time drifted | continue |

A restart repeats what the script does, so it cannot mend the script. What kills a process from
outside may be over.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from fsdp_inspect.diagnosis.diagnose import Diagnosis, ProblemClass, RankState, Status, diagnose
from fsdp_inspect.diagnosis.ends import EndKind
from fsdp_inspect.diagnosis.process_signs import ProcessState
from fsdp_inspect.formatting import capitalize, format_ranks, listed, plural
from fsdp_inspect.trace.run import RunSource

_DEVICE_FAILED = re.compile(
    r"uncorrectable (ECC|NVLink)|ECC error|fallen off the bus|hardware (stack )?error"
    r"|device unavailable|CUDA-capable device\(s\) is/are busy|Xid|NVLink error",
    re.IGNORECASE,
)
_MAY_PASS = re.compile(
    r"^(OSError|IOError|BlockingIOError|(Connection|BrokenPipe|Timeout|URL|HTTP)\w*|\w*(Timeout|Network)Error)\b"
)
"""Errors of files and of the network, which may be over."""
_OF_SCRIPT = {
    ProblemClass.ORDER_DIVERGED: "the ranks issue different collectives",
    ProblemClass.SIZE_MISMATCH: "the ranks reduce tensors of different sizes or dtypes",
    ProblemClass.UNEVEN_BATCHES: "the ranks have different numbers of batches",
    ProblemClass.RANK_EXITED_EARLY: "a rank leaves the loop before the others",
    ProblemClass.FOREIGN_COLLECTIVE: "only some ranks reach a collective of the script",
    ProblemClass.HOST_DEADLOCK: "the script waits for a lock, a queue or a thread of its own",
    ProblemClass.OUT_OF_MEMORY: "the next start needs the same memory",
    ProblemClass.NOT_FINITE: "the values are not finite",
    ProblemClass.PRECISION_LOSS: "updates are lost",
    ProblemClass.TRAINING: "the training itself is wrong",
}
"""Why a restart does not help."""
_MAY_NOT_REPEAT = (ProblemClass.HOST_DEADLOCK, ProblemClass.RANK_EXITED_EARLY)
"""Those that may depend on the time, such as the exit of one rank at a time limit."""


class SchedulerAction(StrEnum):
    """What a scheduler can do."""

    CONTINUE = "continue"
    RESTART = "restart"
    STOP = "stop"
    EXCLUDE = "exclude"
    """Restart without some nodes."""
    CANNOT_TELL = "cannot tell"


EXIT_CODES = {
    SchedulerAction.CONTINUE: 0,
    SchedulerAction.CANNOT_TELL: 2,
    SchedulerAction.RESTART: 10,
    SchedulerAction.STOP: 11,
    SchedulerAction.EXCLUDE: 12,
}
"""The exit code of `diagnose --decide`."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What a scheduler does next."""

    action: SchedulerAction
    nodes: tuple[str, ...]
    """For `EXCLUDE`: the hosts to leave out."""
    is_certain: bool
    """Whether the diagnosis is certain and the decision follows from it."""
    reason: str
    """Why, as a clause."""

    @property
    def sentence(self) -> str:
        """The decision in words, such as `Exclude node gpu-7: the device of rank 3 failed`."""
        nodes = f" node{'s' * (len(self.nodes) > 1)} {listed(self.nodes, 4)}" if self.nodes else ""
        text = f"{self.action.value}{nodes}: {self.reason}."
        return capitalize(text) if self.is_certain else f"Probably: {text}"

    def to_dict(self) -> dict[str, Any]:
        """The attributes as JSON values, with the sentence."""
        return {
            "action": self.action.value,
            "nodes": list(self.nodes),
            "is_certain": self.is_certain,
            "sentence": self.sentence,
        }


def decide(found: Diagnosis, run: RunSource) -> Decision:
    """Decide what follows from a diagnosis.

    Args:
        found: The diagnosis of the run.
        run: The run. Its earlier attempts show what repeats.
    """
    if found.status is Status.HEALTHY:
        return Decision(SchedulerAction.CONTINUE, (), True, "no problem was found")
    if found.status is Status.CANNOT_TELL or found.problem is None:
        return Decision(
            SchedulerAction.CANNOT_TELL, (), True, "the problem of the run is not known"
        )
    return next(_decisions(found, run))


def _decisions(found: Diagnosis, run: RunSource) -> Iterator[Decision]:
    """The decisions that apply, the strongest first."""
    hosts = {record.rank: record.host for record in run.ranks}
    at_fault = tuple(sorted({hosts[rank] for rank in found.ranks if hosts.get(rank)}))
    last = next(iter(run.earlier_attempts[-1:]), None)
    before = None if last is None else diagnose(last)
    if before is None or before.problem is not found.problem:
        last = before = None
    if _DEVICE_FAILED.search(found.failure) and at_fault:
        reason = f"the device of {format_ranks(found.ranks)} failed"
        yield Decision(SchedulerAction.EXCLUDE, at_fault, found.is_certain, reason)
    yield from _of_class(found)
    if _is_error(found):
        yield _of_error(found, before)
    if at_fault and len({*hosts.values()} - {""}) > len(at_fault):
        yield from _of_node(found, before, last, at_fault)
    yield Decision(
        SchedulerAction.RESTART, (), False, "nothing shows that the next start fails too"
    )


def _of_class(found: Diagnosis) -> Iterator[Decision]:
    """The decision that follows from the class of the problem alone."""
    if found.problem is ProblemClass.LOSS_SPIKE:
        is_finite = found.loss_spikes[-1].peak is not None
        reason = "the loss rose and did not recover, and other data may be the reason"
        yield (
            Decision(SchedulerAction.CANNOT_TELL, (), True, reason)
            if is_finite
            else Decision(SchedulerAction.STOP, (), True, "the loss is not finite")
        )
    elif found.problem is ProblemClass.TRAINING and not found.is_certain:
        reason = "the training is probably wrong, and a person must look at the finding"
        yield Decision(SchedulerAction.CANNOT_TELL, (), True, reason)
    elif found.problem in _OF_SCRIPT:
        why = _OF_SCRIPT[found.problem]
        if found.problem is ProblemClass.FOREIGN_COLLECTIVE and found.is_circle:
            why = "the ranks issue the script's collectives in different orders"
        reason = f"a restart does not help, because {why}"
        is_certain = found.is_certain and found.problem not in _MAY_NOT_REPEAT
        yield Decision(SchedulerAction.STOP, (), is_certain, reason)
    elif found.problem is ProblemClass.DRIFT or (
        found.problem is ProblemClass.SLOW_BUT_ALIVE and found.is_running
    ):
        yield Decision(
            SchedulerAction.CONTINUE, (), found.is_certain, "the training makes progress"
        )
    elif found.problem is ProblemClass.STOPPED:
        yield Decision(
            SchedulerAction.RESTART, (), found.is_certain, "the job was ended from outside"
        )
    elif found.oom_kills and found.problem is ProblemClass.RANK_DIED and not _is_error(found):
        reason = "the machine ran out of memory, and the next start needs as much"
        yield Decision(SchedulerAction.STOP, (), False, reason)


def _of_error(found: Diagnosis, before: Diagnosis | None) -> Decision:
    """The decision after an error that Python code raised."""
    who = format_ranks(found.ranks)
    if before is not None and _first_line(before) == _first_line(found):
        reason = f"{who} failed with the same error in two starts in a row"
        return Decision(SchedulerAction.STOP, (), found.is_certain, reason)
    if _MAY_PASS.search(found.failure):
        reason = "errors of files or of the network may be over"
        return Decision(SchedulerAction.RESTART, (), False, reason)
    reason = f"{who} failed with an error of the script, which the next start repeats"
    return Decision(SchedulerAction.STOP, (), False, reason)


def _of_node(
    found: Diagnosis, before: Diagnosis | None, last: RunSource | None, at_fault: tuple[str, ...]
) -> Iterator[Decision]:
    """The decision if the nodes at fault are not all nodes."""
    if before is not None and last is not None and before.ranks:
        earlier = {record.rank: record.host for record in last.ranks}
        if {earlier.get(rank) for rank in before.ranks} == {*at_fault}:
            reason = f"{plural(len(at_fault), 'node')} at fault in two starts in a row"
            yield Decision(SchedulerAction.EXCLUDE, at_fault, False, reason)
    if found.problem is ProblemClass.RANK_LATE and _waits_for_device(found):
        reason = f"{format_ranks(found.ranks)} waits for a device or a disk of its machine"
        yield Decision(SchedulerAction.EXCLUDE, at_fault, False, reason)


def _is_error(found: Diagnosis) -> bool:
    """Whether Python code of a rank at fault raised an error that no other rank explains."""
    return any(state.end.kind is EndKind.EXCEPTION for state in _at_fault(found))


def _first_line(found: Diagnosis) -> str:
    """The error without its step and its numbers."""
    return re.sub(r"\d+", "", found.failure.split("\n", 1)[0]) + found.location


def _waits_for_device(found: Diagnosis) -> bool:
    states = _at_fault(found)
    return len(states) == len(found.ranks) > 0 and all(
        state.process is not None and state.process.state is ProcessState.WAITS_FOR_DEVICE
        for state in states
    )


def _at_fault(found: Diagnosis) -> list[RankState]:
    """The known states of the ranks at fault."""
    states = (found.state_of(rank) for rank in found.ranks)
    return [state for state in states if state is not None]
