"""Write a unified diff of source files of which a run contains only some lines."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import PurePath

from fsdp_inspect.trace.training_code import SourceLines

_UNKNOWN, _MASKED = "\0", "***"


@dataclass(frozen=True, slots=True)
class Edit:
    """New lines in place of the lines `first` to `last`; `last` = `first` - 1 inserts them."""

    file: str
    first: int
    last: int
    lines: tuple[str, ...]


def write_diff(sources: Sequence[SourceLines], edits: Sequence[Edit]) -> str:
    """A diff that `patch -p0` and `git apply -p0` apply.

    Returns:
        Empty if a line of the diff is not in the run, or is there with a masked secret.
    """
    files = dict.fromkeys(edit.file for edit in edits)
    lines = [line for file in files for line in _diff(file, sources, edits)]
    is_known = not any(_UNKNOWN in line or _MASKED in line for line in lines)
    return "\n".join(lines) if is_known else ""


def lines_of(sources: Sequence[SourceLines], file: str, first: int, last: int) -> list[str] | None:
    """Consecutive lines of a file; None if the run does not contain all of them."""
    known = _known(file, sources)
    numbers = range(first, last + 1)
    return [known[at] for at in numbers] if all(at in known for at in numbers) else None


def _diff(file: str, sources: Sequence[SourceLines], edits: Sequence[Edit]) -> Iterator[str]:
    known = _known(file, sources)
    own = sorted((edit for edit in edits if edit.file == file), key=lambda edit: edit.first)
    length = max([*known, *(edit.last for edit in own)], default=0)
    old = [known.get(at, f"{_UNKNOWN}{at}") for at in range(1, length + 1)]
    new, at = list[str](), 1
    for edit in own:
        new += [*old[at - 1 : edit.first - 1], *edit.lines]
        at = edit.last + 1
    # `patch` refuses absolute paths.
    name = PurePath(file).name if PurePath(file).is_absolute() else file
    yield from unified_diff(old, [*new, *old[at - 1 :]], name, name, lineterm="")


def _known(file: str, sources: Sequence[SourceLines]) -> dict[int, str]:
    return {
        each.first_line + at: line
        for each in sources
        if each.file == file
        for at, line in enumerate(each.lines)
    }
