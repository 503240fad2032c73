"""Name what a rank does, from the stack of the thread that trains."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from fsdp_inspect.trace.codes import Phase
from fsdp_inspect.trace.stack_dumps import StackFrame, ThreadStack


class ActivityKind(StrEnum):
    """The kinds of work that a thread can do."""

    BREAKPOINT = "breakpoint"
    DATA = "data"
    CHECKPOINT = "checkpoint"
    EVALUATION = "evaluation"
    GARBAGE_COLLECTION = "garbage collection"
    COMPILE = "compile"
    SLEEP = "sleep"
    LOCK = "lock"
    NETWORK = "network"
    CHILD_PROCESS = "child process"
    FILE = "file"
    COLLECTIVE = "collective"
    """The stack is inside a collective. The black box may not contain it."""
    COMPARISON = "comparison"
    """FSDP Inspect's own comparison of ranks before an optimizer step."""
    FOLLOWS = "follows rank 0"
    """FSDP Inspect waits for rank 0 to begin the recording, where the training waits, too."""
    CODE = "code"
    """The script's own code, or code of a library without its own class."""


@dataclass(frozen=True, slots=True)
class Activity:
    """The current work of a rank's training thread."""

    kind: ActivityKind
    frame: StackFrame | None
    """The innermost frame of the user's code; None: there is none."""
    statement: str
    """The source of that line; empty if it was not recorded."""


_INSIDE = (
    (ActivityKind.BREAKPOINT, re.compile(r"/(pdb|bdb|ipdb|pudb|debugpy|pydevd)(/|\.py|_)")),
    (ActivityKind.FOLLOWS, re.compile(r"fsdp_inspect/recording/folders\.py$")),
    (ActivityKind.COMPARISON, re.compile(r"fsdp_inspect/recording/order_check\.py$")),
    (
        ActivityKind.COLLECTIVE,
        re.compile(r"torch/distributed/(distributed_c10d|_functional_collectives)\.py$"),
    ),
)
"""Classes of libraries that the user's innermost line called."""
_AROUND = (
    (ActivityKind.DATA, re.compile(r"torch/utils/data/|/datasets/|/torchdata/|/streaming/")),
    (
        ActivityKind.CHECKPOINT,
        re.compile(r"torch/distributed/checkpoint/|torch/serialization\.py$|/safetensors/"),
    ),
    # Two files of dynamo are on the stack of code that it only leaves alone, such as optimizers.
    (
        ActivityKind.COMPILE,
        re.compile(r"torch/_(dynamo/(?!eval_frame|external)|inductor/)|/triton/"),
    ),
)
"""Classes of libraries anywhere on the stack. They may call the user's line, as a loader calls a
dataset."""
_INSIDE_OF_PYTHON = (
    (
        ActivityKind.NETWORK,
        re.compile(r"/(socket|ssl)\.py$|/http/|/urllib3?/|/requests/|/aiohttp/"),
    ),
    (ActivityKind.CHILD_PROCESS, re.compile(r"/subprocess\.py$|/multiprocessing/popen_")),
    (
        ActivityKind.LOCK,
        re.compile(r"/(threading|queue)\.py$|/multiprocessing/|/concurrent/futures/|/asyncio/"),
    ),
    (ActivityKind.FILE, re.compile(r"/(shutil|pathlib|tarfile|zipfile|pickle)\.py$|/fsspec/")),
)
_BY_STATEMENT = (
    (ActivityKind.GARBAGE_COLLECTION, re.compile(r"\bgc\.collect\(")),
    (ActivityKind.BREAKPOINT, re.compile(r"\bbreakpoint\(|\bset_trace\(")),
    (ActivityKind.SLEEP, re.compile(r"\bsleep\(")),
    (ActivityKind.DATA, re.compile(r"\bnext\(|\bfor\b.*\bin\b.*(load|data|batch)")),
    (ActivityKind.CHECKPOINT, re.compile(r"\bsave|\bload_state|checkpoint", re.IGNORECASE)),
    (ActivityKind.LOCK, re.compile(r"\.acquire\(|\.join\(|\.wait\(|\.get\(|\bwith\b.*lock")),
    (ActivityKind.CHILD_PROCESS, re.compile(r"\bsubprocess\.|\bos\.system\(")),
    (ActivityKind.FILE, re.compile(r"\bopen\(|\.read\(|\.write\(")),
)
_BY_FUNCTION = (
    (ActivityKind.EVALUATION, re.compile(r"^_*(eval|valid|test_|infer|generat)", re.IGNORECASE)),
    (ActivityKind.CHECKPOINT, re.compile(r"checkpoint|^_*save", re.IGNORECASE)),
    (ActivityKind.DATA, re.compile(r"__next__|__getitem__|^collate|batch", re.IGNORECASE)),
)


def find_activity(stack: ThreadStack, statement: str, phase: Phase) -> Activity:
    """Find the current work of a thread from its stack, its statement and the functions around it.

    Args:
        stack: The stack of the training thread.
        statement: The source of the innermost line of the user's code; empty if unknown.
        phase: The phase of the rank.
    """
    frame = stack.user_frame
    return Activity(_kind(stack, statement, phase), frame, statement)


def _kind(stack: ThreadStack, statement: str, phase: Phase) -> ActivityKind:
    inner: list[StackFrame] = []
    for frame in stack.frames:
        if not frame.is_library:
            break
        inner.append(frame)
    for patterns, frames in (
        (_INSIDE, inner),
        (_AROUND, stack.frames),
        (_INSIDE_OF_PYTHON, inner),
    ):
        for kind, pattern in patterns:
            if any(pattern.search(frame.file.replace("\\", "/")) for frame in frames):
                return kind
    for kind, pattern in _BY_STATEMENT:
        if pattern.search(statement):
            return kind
    for kind, pattern in _BY_FUNCTION:
        if any(pattern.search(frame.function) for frame in stack.frames if not frame.is_library):
            return kind
    return ActivityKind.EVALUATION if phase == Phase.EVALUATION else ActivityKind.CODE
