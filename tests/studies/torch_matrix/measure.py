"""Compare the set-ups with the installed torch: `measure FOLDER` writes FOLDER/setups.json."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fsdp_inspect.importing.kineto import import_traces
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.codes import COLLECTIVES, NO_UNIT, EventKind
from fsdp_inspect.trace.run import RunSource
from tests.studies.torch_matrix.setups import NUM_RANKS, SETUPS

KINDS = sorted(COLLECTIVES - {EventKind.POINT_TO_POINT})

Messages = Counter[tuple[str, str, int]]
"""The number of messages by unit, kind and bytes."""


@dataclass(frozen=True)
class Result:
    """A set-up, compared with torch.profiler and with the training without the recorder."""

    name: str
    num_collectives: int
    """Over all ranks and the profiled steps, as recorded."""
    num_bytes: int
    """The bytes of these collectives."""
    differences: list[str]
    """What differs or was not recorded, in words; empty: nothing."""


def compare(folder: Path, name: str) -> Result:
    """Compare one set-up."""
    import_traces(folder / "traces", folder / "imported", by_step=True)
    recorded, profiled = open_run(folder / "run"), open_run(folder / "imported")
    setup = SETUPS[name]
    count = num_bytes = 0
    differences = [] if recorded.manifest.units else ["the units are not recorded"]
    for rank in range(NUM_RANKS):
        losses = json.loads((folder / f"losses-{rank}.json").read_text())
        ours = messages(recorded, rank, [*setup.profiled_steps])
        count += ours.total()
        num_bytes += sum(size * number for (_, _, size), number in ours.items())
        found = [*recorded.ranks[rank].problems]
        if losses["plain"] != losses["recorded"]:
            found.append(f"losses {losses}")
        found += differ(ours, messages(profiled, rank, None), setup.compared_by)
        differences += [f"rank {rank}: {text}" for text in found]
    return Result(name, count, num_bytes, differences)


def differ(ours: Messages, theirs: Messages, compared_by: str) -> Iterator[str]:
    """The differences, in words. A trace of gloo lacks some sizes: these count by kind only."""
    if not ours:
        yield "nothing was recorded"
    if compared_by == "unit":
        if ours != theirs:
            yield f"{dict(ours - theirs)} recorded only, {dict(theirs - ours)} profiled only"
        return
    counts = [total(each, lambda kind, size: kind) for each in (ours, theirs)]
    if counts[0] != counts[1]:
        yield f"{dict(counts[0])} recorded, {dict(counts[1])} profiled"
    sizes = [total(each, lambda kind, size: (kind, size)) for each in (ours, theirs)]
    unknown = {(kind, -1) for kind in counts[1]}
    extra = {key: number for key, number in (sizes[1] - sizes[0]).items() if key not in unknown}
    if extra:
        yield f"{extra} profiled only"


def total(messages: Messages, key: Callable[[str, int], Any]) -> Counter[Any]:
    found: Counter[Any] = Counter()
    for (_, kind, size), number in messages.items():
        found[key(kind, size)] += number
    return found


def messages(run: RunSource, rank: int, steps: list[int] | None) -> Messages:
    """The number of messages by unit, kind and bytes; a trace names the units of FSDP2 only."""
    events = run.events(rank, kinds=KINDS, **({} if steps is None else {"steps": steps}))
    names = [unit.fqn for unit in run.manifest.units]
    columns = zip(events.unit.tolist(), events.kind.tolist(), events.bytes.tolist(), strict=True)
    return Counter(
        (names[unit] if unit > NO_UNIT else "", EventKind(kind).label, size)
        for unit, kind, size in columns
    )


def main(folder: Path) -> None:
    command = ["-m", "torch.distributed.run", f"--nproc-per-node={NUM_RANKS}", "--standalone"]
    subprocess.run(
        [sys.executable, *command, "-m", "tests.studies.torch_matrix.setups", folder], check=True
    )
    results = [compare(folder / name, name) for name in SETUPS]
    (folder / "setups.json").write_text(json.dumps([asdict(each) for each in results]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
