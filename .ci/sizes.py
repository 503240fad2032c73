"""Keep the code from growing without a reason: a ratchet on modules, data types and lines.

`.ci/sizes.json` holds the sizes of each package. `make check` fails if one is larger. After a
change that makes the code smaller, or that gives users enough to be larger, write the new sizes:

    make sizes                                 (smaller)
    make sizes GAIN="rank page: one command"   (larger: what a user gets for it)
"""

import argparse
import ast
import json
import sys
from collections import Counter
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
FILE = ROOT / ".ci/sizes.json"
TREES = {"fsdp_inspect": ROOT, "fsdp_inspect_app": ROOT / "app"}
SMALL_LINES = 100
SLACK = 1.002
"""Lines may rise by this factor without a new entry, so that a correction needs none."""
DATA_TYPES = ("dataclass", "NamedTuple", "TypedDict", "Enum", "IntEnum", "StrEnum", "Record")


def measure() -> dict[str, dict[str, int]]:
    """The sizes of each package: modules, lines, data types, small modules with one importer."""
    graph = grimp.build_graph(*TREES, cache_dir=None)
    found: dict[str, Counter[str]] = {}
    for tree, root in TREES.items():
        for path in sorted((root / tree).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            words = path.relative_to(root).with_suffix("").parts
            package = words[1] if tree == "fsdp_inspect" and len(words) > 2 else tree
            sizes = found.setdefault(package, Counter())
            sizes["modules"] += 1
            sizes["lines"] += text.count("\n")
            sizes["data types"] += sum(
                _is_data_type(each)
                for each in ast.walk(ast.parse(text))
                if isinstance(each, ast.ClassDef)
            )
            is_small = text.count("\n") < SMALL_LINES and words[-1] not in ("__init__", "__main__")
            if is_small and len(graph.find_modules_that_directly_import(".".join(words))) == 1:
                sizes["small modules with one importer"] += 1
    found["tests"] = Counter(
        lines=sum(path.read_text().count("\n") for path in (ROOT / "tests").rglob("*.py"))
    )
    return {package: dict(sorted(sizes.items())) for package, sizes in sorted(found.items())}


def _is_data_type(found: ast.ClassDef) -> bool:
    words = ast.unparse(ast.Tuple([*found.decorator_list, *found.bases]))
    return any(name in words for name in DATA_TYPES)


def find_growth(limits: dict[str, dict[str, int]], now: dict[str, dict[str, int]]) -> list[str]:
    """One sentence for each size above its limit."""
    grown = []
    for package, sizes in now.items():
        for name, size in sizes.items():
            limit = limits.get(package, {}).get(name, 0)
            if size > (limit * SLACK if name == "lines" else limit):
                grown.append(f"{package}: {size:,} {name}, and the limit is {limit:,}.")
    return grown


def main() -> int:
    """Check the sizes, or write them with `--write`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the sizes of this checkout")
    parser.add_argument("--gain", default="", help="what a user gets for code that grew")
    given = parser.parse_args()
    kept = json.loads(FILE.read_text()) if FILE.exists() else {"gains": [], "sizes": {}}
    now = measure()
    grown = find_growth(kept["sizes"], now)
    if grown and not (given.write and given.gain):
        print(*grown, sep="\n", file=sys.stderr)
        print(
            "The code grew. Expected sizes within .ci/sizes.json. Remove what no user would miss, "
            'or state what users get: make sizes GAIN="..."',
            file=sys.stderr,
        )
        return 1
    if given.write:
        gains = kept["gains"] + ([given.gain] if grown else [])
        FILE.write_text(json.dumps({"gains": gains, "sizes": now}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
