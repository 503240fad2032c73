"""Write the measured matrix into a page: `python -m tests.studies.frameworks FOLDER PAGE`."""

import sys
from pathlib import Path

from tests.studies.frameworks.table import read_rows, render, replace


def main(folder: Path, page: Path) -> None:
    page.write_text(replace(page.read_text(), render(read_rows(folder))))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
