"""Reads OpenMetrics 1.0 text strictly, and refuses what the specification does not allow.

Written from the grammar of the specification, for the kinds of metrics that we write: gauges, info
and state sets.
"""

import re
from dataclasses import dataclass, field

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_DESCRIPTOR = re.compile(rf"# (TYPE|UNIT|HELP) ({_NAME}) (.+)")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\\\|\\"|\\n)*)"(,|$)')
_SAMPLE = re.compile(rf"({_NAME})\{{(.*)\}} (\S+)")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?([eE][+-]?\d+)?|Inf)|NaN")
_SUFFIXES = {"gauge": "", "info": "_info", "stateset": ""}
_ESCAPES = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}


@dataclass
class ParsedFamily:
    """A metric as it was read."""

    type: str = "unknown"
    unit: str = ""
    help: str = ""
    samples: list[tuple[dict[str, str], float]] = field(default_factory=list)

    def value(self, **labels: str) -> float:
        """The only number with these labels."""
        found = [value for own, value in self.samples if labels.items() <= own.items()]
        assert len(found) == 1, (labels, found)
        return found[0]


def parse(text: str) -> dict[str, ParsedFamily]:
    """The metrics of a text, by name; fails the test where it is not legal."""
    assert text.endswith("\n# EOF\n") or text == "# EOF\n"
    families: dict[str, ParsedFamily] = {}
    current = ""
    for line in text.removesuffix("# EOF\n").split("\n")[:-1]:
        described = _DESCRIPTOR.fullmatch(line)
        if described:
            current = _describe(families, current, *described.groups())
        else:
            _add_sample(families[current], current, line)
    for name, family in families.items():
        assert not family.unit or name.endswith(f"_{family.unit}"), name
        keys = [tuple(sorted(labels.items())) for labels, _ in family.samples]
        assert len(keys) == len(set(keys)), f"{name} has a number twice"
    return families


def _describe(
    families: dict[str, ParsedFamily], current: str, keyword: str, name: str, text: str
) -> str:
    if name != current:
        assert name not in families, f"{name} is interleaved with others"
        families[name] = ParsedFamily()
    family = families[name]
    assert not family.samples, f"{keyword} of {name} comes after its numbers"
    setattr(family, keyword.lower(), _unescape(text))
    return name


def _add_sample(family: ParsedFamily, name: str, line: str) -> None:
    found = _SAMPLE.fullmatch(line)
    assert found, line
    assert found[1] == name + _SUFFIXES[family.type], line
    assert _NUMBER.fullmatch(found[3]), line
    value = float(found[3].replace("Inf", "inf"))
    labels, place = {}, 0
    while place < len(found[2]):
        label = _LABEL.match(found[2], place)
        assert label, line
        assert label[1] not in labels, line
        labels[label[1]], place = _unescape(label[2]), label.end()
    if family.type == "stateset":
        assert name in labels, line
    if family.type in ("stateset", "info"):
        assert value in ((0, 1) if family.type == "stateset" else (1,))
    family.samples.append((labels, value))


def _unescape(text: str) -> str:
    return re.sub(r'\\[\\"n]', lambda found: _ESCAPES[found[0]], text)
