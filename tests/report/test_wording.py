from types import SimpleNamespace

import pytest

from fsdp_inspect.formatting import MISSING
from fsdp_inspect.report.wording import (
    describe_main_cause,
    format_change,
    format_error,
    name_backend,
)


@pytest.mark.parametrize(
    ("ratio", "change", "error"),
    [
        (None, MISSING, MISSING),
        (0, "=", "0%"),
        (-0.00001, "0.0%", "0.0%"),
        (0.00001, "0.0%", "0.0%"),
        (-0.227, "-22.7%", "-22.7%"),
        (0.1, "+10%", "+10%"),
    ],
)
def test_changes_and_errors_have_a_sign_and_nothing_has_none(ratio, change, error):
    assert (format_change(ratio), format_error(ratio)) == (change, error)


@pytest.mark.parametrize(
    ("backend", "name"), [("nccl", "nccl"), ("fake", "emulated"), ("", ""), (None, "")]
)
def test_torchs_fake_backend_is_called_emulated(backend, name):
    assert name_backend(backend) == name


@pytest.mark.parametrize(
    ("causes", "said", "in_headline"),
    [
        ({}, "", ""),
        ({"late_issue": 9, "floor": 1}, "mostly late issue", "mostly late issue"),
        ({"floor": 9, "straggler": 1}, "mostly floor, then waiting for the last rank", ""),
        ({"floor": 9}, "mostly floor", ""),
        ({"floor": 4, "bandwidth": 3, "straggler": 3}, "floor and bandwidth", ""),
    ],
)
def test_the_main_cause_names_what_the_floor_hides(causes, said, in_headline):
    waits = [SimpleNamespace(causes_ns={name: ns}) for name, ns in causes.items()]
    assert describe_main_cause(waits) == said
    assert describe_main_cause(waits, is_headline=True) == in_headline
