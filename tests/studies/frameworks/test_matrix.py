"""Every framework of the matrix is recorded, and every cell holds. Run by `make frameworks`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.studies.frameworks.entries import ENTRIES, Entry
from tests.studies.frameworks.measured import Measured, Recording, measure, write

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(1800)]

RESULTS = "FSDP_INSPECT_FRAMEWORKS"
"""The folder for the measured rows; without it they are discarded."""


@pytest.fixture(scope="module", params=ENTRIES, ids=lambda entry: entry.name)
def entry(request: pytest.FixtureRequest) -> Entry:
    return request.param


@pytest.fixture(scope="module")
def measured(entry: Entry, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    row = measure(entry, tmp_path_factory.mktemp(entry.name))
    if folder := os.environ.get(RESULTS):
        write(row, Path(folder) / f"{entry.name}.json")
    return row


@pytest.fixture(params=["zero_code", "callback"])
def recording(request: pytest.FixtureRequest, measured: Measured) -> Recording:
    return getattr(measured, request.param)


def test_the_losses_are_identical_to_the_last_bit(recording: Recording) -> None:
    assert recording.losses == ""


def test_each_step_has_the_collectives_that_the_profiler_counted(recording: Recording) -> None:
    assert recording.counts == ""


def test_the_run_is_complete_and_nothing_was_left_out(recording: Recording) -> None:
    assert recording.recording == ""


def test_no_alarm_is_raised_at_the_plan(recording: Recording) -> None:
    assert recording.plan == ""


def test_every_command_answers(recording: Recording) -> None:
    assert {name: fault for name, fault in recording.commands.items() if fault} == {}
