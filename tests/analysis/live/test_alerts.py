"""Alerts on live runs: each rule finds its problem, once, and nothing in a healthy run."""

import dataclasses
import math
import re

import pytest

from fsdp_inspect.alert_rules import RULES, AlertRule
from fsdp_inspect.analysis.live.alerts import RunAlerts
from fsdp_inspect.analysis.live.feed import LiveState
from fsdp_inspect.analysis.live.monitor import Monitor
from fsdp_inspect.analysis.live.view import LiveScalar
from fsdp_inspect.store.folder import create_run
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.run import RunStatus
from tests.analysis.live.test_feed import write_steps
from tests.store.run_files import make_manifest

ALL = [AlertRule.parse(name) for name in RULES]


@pytest.fixture
def healthy(tmp_path):
    """The monitored numbers of a run of 20 steps of two ranks."""
    create_run(tmp_path / "run", make_manifest(warmup_steps=0, memory_steps=[]))
    writers = [write_steps(tmp_path / "run", rank, num_steps=20) for rank in (0, 1)]
    yield Monitor([0, 1]).look(open_run(tmp_path / "run"))
    for writer in writers:
        writer.close(RunStatus.COMPLETE)


def changed(run, **fields):
    """The run with other numbers of rank 0."""
    first, *others = run.ranks
    return dataclasses.replace(run, ranks=(dataclasses.replace(first, **fields), *others))


def slowed(run, factor):
    numbers = run.ranks[0].numbers
    step_ns = round(factor * numbers.step_time_ns)
    return changed(run, numbers=dataclasses.replace(numbers, step_time_ns=step_ns))


def test_a_healthy_run_raises_no_alert(healthy):
    alerts = RunAlerts(ALL)
    assert [alerts.look(healthy) for _ in range(3)] == [[], [], []]


def test_a_stalled_run_raises_one_alert_until_it_moves_again(healthy):
    alerts, stalled = RunAlerts(ALL), dataclasses.replace(healthy, state=LiveState.STALLED)
    (alert,) = alerts.look(stalled)
    assert alert.text == f"{healthy.manifest.run_id}, step 19: No step ends any more."
    assert alerts.look(stalled) == []
    assert alerts.look(healthy) == []
    assert len(alerts.look(stalled)) == 1


def test_a_run_that_dies_after_a_stall_raises_a_second_alert(healthy):
    alerts = RunAlerts(ALL)
    states = (LiveState.STALLED, LiveState.CUT_OFF)
    found = [alerts.look(dataclasses.replace(healthy, state=state)) for state in states]
    assert [len(each) for each in found] == [1, 1]
    assert "stopped without a recorded end" in found[1][0].sentence


def test_a_loss_that_is_not_finite_is_named_with_its_step(healthy):
    alerts = RunAlerts(ALL)
    good, bad = (LiveScalar("loss", 12, value) for value in (2.5, math.nan))
    assert alerts.look(changed(healthy, scalars={"loss": good})) == []
    (alert,) = alerts.look(changed(healthy, scalars={"loss": bad}))
    assert (alert.rule, alert.sentence) == ("nan", "The logged loss is nan on rank 0.")
    assert alert.text == f"{healthy.manifest.run_id}, step 12: {alert.sentence}"


@pytest.mark.parametrize(("ratio", "count"), [(0.95, 0), (0.96, 1)])
def test_memory_above_the_limit_names_the_fullest_rank(healthy, ratio, count):
    found = RunAlerts(ALL).look(changed(healthy, reserved_ratio=ratio))
    assert len(found) == count
    assert all("rank 0 reserves 96% of its device" in each.sentence for each in found)


def test_longer_steps_are_compared_with_the_fastest_of_the_run(healthy):
    alerts = RunAlerts([AlertRule.parse("slow=20%")])
    assert alerts.look(slowed(healthy, 2)) == []
    assert alerts.look(healthy) == []
    assert alerts.look(slowed(healthy, 1.19)) == []
    (alert,) = alerts.look(slowed(healthy, 1.25))
    assert "25% more than the fastest one of the run" in alert.sentence


def test_each_limit_of_a_rule_raises_its_alert_once(healthy):
    names = ["slow=20%", "slow=80%", "memory=80%", "memory=95%"]
    alerts = RunAlerts([AlertRule.parse(name) for name in names])
    limits = []
    for factor in (1, 1.3, 1.5, 1.9, 2.5):
        run = slowed(changed(healthy, reserved_ratio=factor / 2), factor)
        limits.append([re.findall(r"\d+%", each.sentence)[-1] for each in alerts.look(run)])
    assert limits == [[], ["20%"], [], ["80%", "80%"], ["95%"]]


@pytest.mark.parametrize("text", ["stall", "nan", "memory=90%", "slow=12.5%"])
def test_a_rule_is_printed_as_it_is_read(text):
    assert str(AlertRule.parse(text)) == text


@pytest.mark.parametrize("text", ["", "loss", "stall=5%", "memory=", "memory=90", "slow=-1%"])
def test_an_invalid_rule_is_refused_with_its_text(text):
    with pytest.raises(ValueError, match="Invalid") as raised:
        AlertRule.parse(text)
    assert repr(text) in str(raised.value)
