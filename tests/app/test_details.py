"""The details of a selected event; a field with an unknown value is absent."""

import dataclasses

import pytest
from fsdp_inspect_app.app_pages.timeline.frames import tell_event, tell_origin, tell_wait

from fsdp_inspect.analysis.step_waits import EventFacts

GATHER = EventFacts(
    kind="all_gather",
    fqn="layers.1",
    phase="forward",
    issued_by="layers.0",
    start_ns=12_000_000,
    duration_ns=4_120_000,
    bytes=109 << 20,
    dtype="bfloat16",
    group="shard",
    bus_bytes_per_s=26.5e9,
    fit_bus_bytes_per_s=27.1e9,
    lead_ns=300_000,
    exposed_ns=2_900_000,
    causes_ns={"late_issue": 2_900_000},
    source="recorded",
    method="measured",
)


def shown(markdown):
    return markdown.replace("\\", "")


def test_a_collective_is_told_in_one_line():
    assert shown(tell_event(GATHER)) == (
        "**all-gather** `layers.1` · forward · 109 MiB of bfloat16 · 4.12 ms · 26.5 GB/s bus "
        "(fit 27.1 GB/s) · issued 300 µs before it was needed · exposed 2.90 ms: late issue"
    )


def test_several_causes_are_told_with_their_parts():
    facts = dataclasses.replace(GATHER, causes_ns={"late_issue": 2_000_000, "bandwidth": 900_000})
    assert shown(tell_event(facts)).endswith("exposed 2.90 ms: late issue 2.00 ms, transfer 900 µs")
    assert shown(tell_wait(facts)) == "**all-gather** `layers.1` 2.90 ms · late issue"


@pytest.mark.parametrize(
    ("lead_ns", "words"),
    [
        pytest.param(0, "issued when it was needed", id="at once"),
        pytest.param(-50_000, "issued 50.0 µs after it was needed", id="after"),
    ],
)
def test_the_lead_says_on_which_side_it_is(lead_ns, words):
    assert words in shown(tell_event(dataclasses.replace(GATHER, lead_ns=lead_ns)))


def test_compute_has_neither_message_nor_wait():
    forward = EventFacts(
        kind="forward",
        fqn="",
        phase="forward",
        issued_by=None,
        start_ns=0,
        duration_ns=1_000_000,
        bytes=None,
        dtype=None,
        group=None,
        bus_bytes_per_s=None,
        fit_bus_bytes_per_s=None,
        lead_ns=None,
        exposed_ns=None,
        causes_ns={},
        source="predicted",
        method="inferred",
    )
    assert shown(tell_event(forward)) == "**forward** `(root)` · forward · 1.00 ms"
    assert tell_origin(forward) == "0 ns after the step began · predicted, inferred"


def test_the_origin_names_issuer_group_and_method():
    assert tell_origin(GATHER) == (
        "12.0 ms after the step began · issued by layers.0 · process group shard · "
        "recorded, measured"
    )


def test_what_nobody_waited_for_is_not_exposed():
    facts = dataclasses.replace(GATHER, exposed_ns=0, causes_ns={}, lead_ns=None)
    assert shown(tell_event(facts)).endswith("(fit 27.1 GB/s) · not exposed")
