"""Names and facts appear unchanged."""

import re
from dataclasses import replace

import pytest
from fsdp_inspect_app import wording

from fsdp_inspect.analysis.provenance import Provenance
from fsdp_inspect.analysis.rank_waits import measure_rank_waits
from fsdp_inspect.analysis.run_heading import describe_sharding
from fsdp_inspect.analysis.summary import measure_summary
from fsdp_inspect.report.wording import describe_provenance
from tests.app.synthetic import make_manifest, make_run

HOSTILE = "a*b_c [x](http://e) <b>d</b> `e` $f$ :red[g] # h ~i~ | \\"


def unescaped(markdown):
    """The text of escaped Markdown as a reader sees it."""
    return re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", markdown)


def test_plain_text_escapes_all_punctuation_and_reads_the_same():
    assert unescaped(wording.plain(HOSTILE)) == HOSTILE
    assert not re.search(r"(?<!\\)[*_`\[\]<>$#|~]", wording.plain(HOSTILE).replace(r"\\", ""))


def test_plain_text_breaks_emoji_and_icon_shortcodes():
    shown = unescaped(wording.plain("layers:smile:1 and :material/delete:"))
    assert ":smile:" not in shown
    assert ":material/delete:" not in shown
    assert shown.replace("\N{WORD JOINER}", "") == "layers:smile:1 and :material/delete:"


def test_a_time_keeps_its_colons():
    assert unescaped(wording.plain("from 12:30 to 12:45")) == "from 12:30 to 12:45"


def test_line_breaks_and_control_characters_become_spaces():
    assert wording.plain("a\nb\x00c") == "a b c"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        pytest.param("layers.0", "`layers.0`", id="plain"),
        pytest.param("a`b", "`` a`b ``", id="backtick"),
        pytest.param("``", "``` `` ```", id="only backticks"),
    ],
)
def test_a_name_in_code_has_a_fence_longer_than_its_backticks(name, expected):
    assert wording.code(name) == expected


def test_a_plan_is_put_into_a_few_words():
    assert describe_sharding(make_manifest()) == "10 units, reshard after forward, bfloat16"


@pytest.mark.parametrize(
    ("reshard", "expected"),
    [
        pytest.param(False, "kept after forward", id="false"),
        pytest.param(1, "reshard to groups of 1 ranks", id="one is not true"),
        pytest.param(2, "reshard to groups of 2 ranks", id="integer"),
    ],
)
def test_a_plan_says_what_happens_after_forward(reshard, expected):
    manifest = make_manifest()
    units = [
        unit if unit.is_root else unit.model_copy(update={"reshard_after_forward": reshard})
        for unit in manifest.units
    ]
    assert expected in describe_sharding(manifest.model_copy(update={"units": units}))


def test_numbers_obtained_alike_are_said_to_be_in_one_word():
    provenance = Provenance(
        sources=("recorded",),
        methods={"step": "measured", "all_gather": "measured"},
        memory=None,
        blocks_host=False,
    )
    assert describe_provenance(provenance, "step", "all_gather", "data") == ("Recorded, measured.")


def test_numbers_obtained_in_several_ways_are_listed_by_way():
    provenance = Provenance(
        sources=("emulated",),
        methods={"forward": "measured", "all_gather": "inferred, host_blocking"},
        memory=None,
        blocks_host=False,
    )
    assert describe_provenance(provenance, "forward", "all_gather") == (
        "Emulated; measured: forward; inferred and host-blocking: all-gather."
    )


def test_the_unit_that_is_waited_for_most_is_named_with_its_time():
    digest = measure_summary(make_run())
    top = max(digest.units, key=lambda unit: unit.exposed_ns)
    sentence = wording.describe_largest_waits(digest)
    assert f"{top.exposed_ns / 1e6:.1f} ms" in unescaped(sentence)
    assert "`(root)`" in sentence


def test_the_headline_of_the_longest_wait_names_its_unit_and_main_cause():
    run = make_run()
    digest, owners = measure_summary(run), measure_rank_waits(run).exposed.owners
    sentence = unescaped(wording.describe_largest_waits(digest, owners))
    top = max(digest.units, key=lambda unit: unit.exposed_ns)
    start = f"Largest waits of a unit: `(root)`, {top.exposed_ns / 1e6:.1f} ms per step"
    assert sentence == f"{start}."  # they are the floor
    late = [replace(each, causes_ns={"late_issue": each.exposed_ns}) for each in owners]
    sentence = unescaped(wording.describe_largest_waits(digest, late))
    assert sentence == f"{start}, mostly late issue."


def test_a_command_in_a_sentence_is_code():
    shown = wording.plain("Next: run `fsdp-inspect show a_b memory` (or `.item()`), not `a_b`.")
    assert shown == (
        "Next\\: run `fsdp-inspect show a_b memory` \\(or `.item()`\\)\\, not \\`a\\_b\\`\\."
    )


def test_a_statement_in_brackets_is_code():
    assert wording.plain("at train.py (`x = a[0]  # *`)") == "at train\\.py \\(`x = a[0]  # *`\\)"
