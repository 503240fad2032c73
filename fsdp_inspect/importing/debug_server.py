"""Ask torch's debug server for the stacks and the flight recorder of each rank.

The server of `torch.distributed.debug` runs on rank 0 and names the server of each rank on its page
of stacks. These answer while the training thread hangs. The answers become files of dumps, which
`flight_recorder` reads.
"""

import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_inspect.errors import ImportingError
from fsdp_inspect.importing.flight_recorder_file import MAX_FILE_BYTES
from fsdp_inspect.trace.records import MAX_WORLD_SIZE

TIMEOUT_S = 20.0
_STACKS = "dump_traceback"
_RECORDERS = ("fr_trace_json", "dump_nccl_trace_json?onlyactive=false")
"""The recorder of all backends but NCCL, and NCCL's own."""
_RANK = re.compile(rf"Rank (\d{{1,6}}): (https?://[^\s<>\"]+)/handler/{_STACKS}\b")
_MOST_THREADS = 20


@dataclass(frozen=True, slots=True)
class _Answer:
    stacks: str
    dump: bytes
    """Empty: the flight recorder lists no collective."""


def is_debug_server(argument: str) -> bool:
    """Whether an argument is the address of a debug server: `http://host:port`."""
    parts = urllib.parse.urlsplit(argument)
    return parts.scheme in ("http", "https") and bool(parts.port) and parts.path in ("", "/")


def fetch_dumps(address: str, folder: Path) -> Mapping[int, str]:
    """Write the flight recorder of each rank to a folder.

    Args:
        address: The debug server of the job.
        folder: The folder to create.

    Returns:
        The stacks by rank. A rank that does not answer is missing.

    Raises:
        ImportingError: The server does not answer, is of another kind, or no rank recorded
            collectives.
    """
    workers = _find_workers(address)
    with ThreadPoolExecutor(_MOST_THREADS) as pool:
        found = dict(zip(workers, pool.map(_ask, workers.values()), strict=True))
    answers = {rank: answer for rank, answer in found.items() if answer is not None}
    if not answers:
        raise ImportingError(
            f"None of {len(workers)} ranks of {address} answers, such as "
            f"{next(iter(workers.values()))}. Expected servers that this machine can reach. Run "
            "the command on a machine of the cluster."
        )
    if not any(answer.dump for answer in answers.values()):
        raise ImportingError(
            f"The flight recorders of {address} list no collective. Expected some. Set "
            "TORCH_FR_BUFFER_SIZE=2000 before the training starts. The server's page /stacks "
            "shows the stacks."
        )
    folder.mkdir(parents=True)
    for rank, answer in answers.items():
        if answer.dump:
            (folder / f"fr_rank_{rank}.json").write_bytes(answer.dump)
    return {rank: answer.stacks for rank, answer in answers.items()}


def _find_workers(address: str) -> dict[int, str]:
    """The server of each rank."""
    page = f"{address.rstrip('/')}/stacks"
    try:
        text = _request(page, None).decode(errors="replace")
    except (OSError, ValueError) as error:
        raise ImportingError(
            f"The debug server {page} cannot be read: {error}. Expected a server that "
            "torch.distributed.debug.start_debug_server started. Check the address and the port "
            "(25999 by default)."
        ) from error
    workers = {int(rank): worker for rank, worker in _RANK.findall(text)}
    if not workers or max(workers) >= MAX_WORLD_SIZE:
        raise ImportingError(
            f"{page} lists no ranks. Expected a page of torch.distributed.debug. Check the address."
        )
    return dict(sorted(workers.items()))


def _ask(worker: str) -> _Answer | None:
    """The stacks and the collectives of a rank; None: it does not answer."""
    try:
        stacks = _request(f"{worker}/handler/{_STACKS}", b"").decode(errors="replace")
    except (OSError, ValueError):
        return None
    return _Answer(stacks, max((_recorded(worker, each) for each in _RECORDERS), key=len))


def _recorded(worker: str, handler: str) -> bytes:
    """The dump of one flight recorder; empty: there is none, or it is empty."""
    try:
        content = _request(f"{worker}/handler/{handler}", b"")
        dump: Any = json.loads(content)
    except (OSError, ValueError, RecursionError):
        return b""
    entries = dump.get("entries") if isinstance(dump, dict) else None
    return content if isinstance(entries, Sequence) and entries else b""


def _request(url: str, data: bytes | None) -> bytes:
    """Read an answer of a server; `data` makes it a POST request."""
    request = urllib.request.Request(url, data=data)
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        content: bytes = answer.read(MAX_FILE_BYTES)
    return content
