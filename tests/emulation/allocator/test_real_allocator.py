"""The model answers like torch's own allocator, as recorded by `real_allocator/record.py`."""

import json
from typing import Any

import pytest

from fsdp_inspect.emulation.allocator.settings import parse_settings
from tests.emulation.allocator.random_events import ModelDriver
from tests.emulation.allocator.real_allocator.record import ANSWERS, checksum, possible_events


@pytest.mark.parametrize(
    "case",
    json.loads(ANSWERS.read_text()),
    ids=lambda case: f"{case['settings'] or 'defaults'} on {case['device_bytes'] >> 20} MiB",
)
def test_addresses_and_amounts_are_those_of_torch(case: dict[str, Any]) -> None:
    settings = parse_settings(case["settings"], device_bytes=case["device_bytes"])
    model = ModelDriver(settings)
    answers = [model.answer(event) for event in possible_events(settings, case["seed"])]
    assert len(answers) == case["events"]
    assert checksum(answers) == case["crc32"]
