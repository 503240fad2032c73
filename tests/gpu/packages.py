"""List the packages that the GPU script needs, with versions: `python -m tests.gpu.packages`.

`wheels.txt` names those that the GPU machine lacks, and `image.txt` those that its image has. The
exit code is 1 if one is missing. This module imports none of them.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

WHEELS = "wheels.txt"
IMAGE = "image.txt"


def read_names(file: str) -> list[str]:
    """The package names in one of the two files."""
    lines = (Path(__file__).parent / file).read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def main() -> int:
    """Print each package; returns the exit code."""
    missing = []
    found = []
    for name in (*read_names(IMAGE), *read_names(WHEELS)):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    print(f"Python {sys.version.split()[0]}, {', '.join(found)}")
    if missing:
        print(
            f"Missing packages: {', '.join(missing)}. Expected all that tests/gpu/{WHEELS} and "
            f"{IMAGE} name. Fetch their wheels into .whl/ as tests/gpu/README.md describes."
        )
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
