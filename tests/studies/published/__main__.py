"""Replay published trainings: `python -m tests.studies.published ROWS.json [--out FILE.md]`."""

import argparse
import json
import sys
from pathlib import Path

from tests.studies.published.replay import replay, summarize, write_page


def main() -> int:
    """Replay the rows of a file, and print each with the summary by class."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path, help="a file in the format of published_rows.json")
    parser.add_argument("--out", type=Path, help="write a page in Markdown")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    given = parser.parse_args()
    rows = json.loads(given.rows.read_text())["rows"]
    found = [replay(row) for row in rows]
    if given.json:
        print(json.dumps({"rows": [each.to_dict() for each in found]}, indent=1))
    else:
        print("\n".join([*map(str, found), "", *summarize(found)]))
    if given.out:
        given.out.write_text(write_page(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
