"""Limits are read in usual notations; others are refused with a message."""

import re
from pathlib import Path

import pytest

from fsdp_inspect.comparison.gate.limits import parse_gate_limit, read_budget
from fsdp_inspect.errors import CheckError

GIB = 1 << 30
GUIDE = Path(__file__).parents[3] / "docs/gate.md"


@pytest.mark.parametrize(
    ("metric", "text", "baseline", "allowed"),
    [
        ("peak_allocated_bytes", "38 GiB", None, 38 * GIB),
        ("peak_allocated_bytes", "+2%", 1000, 1020),
        ("peak_allocated_bytes", "+1 MiB", 5, 5 + (1 << 20)),
        ("step_time_ns", "420 ms", None, 420_000_000),
        ("exposed_ns", "+5%", 200, 210),
        ("category.activation", "+0 B", 7, 7),
        ("resting_bytes", "+1%", None, None),
    ],
)
def test_a_limit_allows_what_it_says(metric, text, baseline, allowed):
    assert parse_gate_limit(metric, text).allowed(baseline) == allowed


def test_the_budget_of_the_guide_is_one(tmp_path):
    [budget] = re.findall(r"```toml\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)
    (tmp_path / "budget.toml").write_text(budget)
    limits = read_budget(tmp_path / "budget.toml")
    assert limits["peak_allocated_bytes"].absolute == 38 * GIB
    assert len(limits) == 3


@pytest.mark.parametrize(
    ("metric", "text", "message"),
    [
        ("peak_alocated_bytes", "1 GiB", "peak_allocated_bytes"),
        ("peak_allocated_bytes", "lots", r"'38 GiB'.*'\+2%'"),
        ("peak_allocated_bytes", "+-2%", "Expected"),
        ("step_time_ns", "38 GiB", "'420 ms'"),
    ],
)
def test_what_is_no_limit_is_refused(metric, text, message):
    with pytest.raises(CheckError, match=message):
        parse_gate_limit(metric, text)


def test_a_budget_is_a_table_of_limits(tmp_path):
    path = tmp_path / "budget.toml"
    path.write_text('[limits]\npeak_allocated_bytes = "1 GiB"\ncategory.activation = "+1 MiB"\n')

    assert {name: limit.text for name, limit in read_budget(path).items()} == {
        "peak_allocated_bytes": "1 GiB",
        "category.activation": "+1 MiB",
    }


@pytest.mark.parametrize("text", ["", "[other]\nx = 1\n", "[limits", "limits = 3\n"])
def test_a_budget_without_limits_is_refused(tmp_path, text):
    path = tmp_path / "budget.toml"
    path.write_text(text)

    with pytest.raises(CheckError, match="budget"):
        read_budget(path)
