"""The heading of a run has the numbers of its summary, without the waits."""

from dataclasses import fields
from pathlib import Path

import pytest

from fsdp_inspect.analysis.run_heading import RunHeading, measure_run_heading
from fsdp_inspect.analysis.summary import measure_summary
from fsdp_inspect.store.reader import open_run
from tests.builders import RunBuilder

SAMPLES = sorted(path.parent for path in (Path(__file__).parents[2] / "samples").glob("*/run.json"))


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name)
def test_every_field_is_the_digests_own(path: Path):
    run = open_run(path)
    outline, digest = measure_run_heading(run), measure_summary(run)
    for field in fields(RunHeading):
        assert getattr(outline, field.name) == getattr(digest, field.name), field.name


def test_a_run_without_a_step_has_an_outline():
    outline = measure_run_heading(RunBuilder().build())
    assert (outline.median_rank, outline.breakdown) == (None, None)
