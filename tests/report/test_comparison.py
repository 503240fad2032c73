from fsdp_inspect.comparison.comparison import compare_runs
from fsdp_inspect.report.comparison import MOST_UNITS, render_comparison
from fsdp_inspect.trace.codes import MemoryPoint
from tests.builders import RunBuilder, steady_run
from tests.comparison.test_comparison import repeats, run_of_step
from tests.report.terminal_text import text_of

HEAD = """\
Compared runs
A  kept, times of rank 0
B  freed, times of rank 0
reshard: false -> true

"""
TABLES = """\
B compared with A
                            A       B  change
step time              100 ns  150 ns    +50%
communication           10 ns   50 ns   +400%
exposed communication   10 ns   50 ns   +400%
collectives                 1       1       =  equal
communicated bytes       64 B    64 B       =  equal
peak allocated              –       –       –
peak reserved               –       –       –

Parts of the typical step (the changes add up)
                        A       B  change
forward             90 ns  100 ns  +10 ns
exposed all-gather  10 ns   50 ns  +40 ns

Causes of the exposed communication
           A      B  change
floor  10 ns  50 ns  +40 ns

Units: 1 of 2 with the largest change of exposed time
unit             A exposed       bus      B exposed      bus
layers.0
  all-gather 10 ns   10 ns 3.20 GB/s  50 ns   50 ns 640 MB/s
  forward    90 ns                   100 ns
"""


def text_of_runs(*runs):
    return text_of(render_comparison(compare_runs(*runs)))


def test_two_runs_read_settings_first_then_words_then_tables():
    first = run_of_step(100, exposed=10, run_id="kept", config={"reshard": False})
    second = run_of_step(150, exposed=50, run_id="freed", config={"reshard": True})
    comparison = compare_runs(first, second)
    shown = text_of(render_comparison(comparison))
    assert shown.startswith(HEAD)
    assert TABLES in shown
    (conclusion,) = comparison.conclusions
    between = " ".join(shown.removeprefix(HEAD).partition(TABLES)[0].split())
    assert between == " ".join([conclusion.sentence, *conclusion.reasons])


def test_a_small_difference_of_times_is_marked_as_noise():
    shown = text_of_runs(run_of_step(100), run_of_step(104))
    assert "+4%  within noise" in shown
    assert "changes of times below 10% are within" in shown


def test_equal_runs_are_called_equal():
    shown = text_of_runs(steady_run(run_id="a"), steady_run(run_id="b"))
    assert "The recorded settings are equal." in shown
    assert "388 B    388 B       =  equal" in shown


def test_a_tested_side_shows_its_interval():
    before = repeats([100, 101, 102, 103, 104], git_commit="old")
    after = repeats([105, 106, 107, 108, 109], git_commit="new")
    shown = text_of_runs(before, after)
    assert "A  5 runs; median step time: old-2" in shown
    assert "+4.9%  +2.0% to +7.8%" in shown
    assert "Hodges-Lehmann" in shown


def test_each_side_but_the_reference_has_tables_of_its_own():
    shown = text_of_runs(*(run_of_step(100 * n, git_commit=str(n)) for n in (1, 2, 3)))
    assert "B compared with A" in shown
    assert "C compared with A" in shown
    assert "code: git_commit: 1 -> 2 -> 3" in shown


def test_cautions_come_before_the_settings():
    lines = text_of_runs(steady_run(), steady_run(world_size=4)).splitlines()
    assert lines[3].startswith("caution: Different world size")


def test_collectives_that_changed_are_listed_with_number_and_size():
    second = RunBuilder()
    rank = second.rank(0)
    rank.step(0, 0, 100)
    rank.all_gather("layers.0", 0, 10, bytes=64)
    rank.all_gather("layers.0", 20, 30, bytes=64)
    shown = text_of_runs(run_of_step(100, exposed=10), second.build())
    assert "Collectives with a changed number or size, per step" in shown
    assert "layers.0  all-gather  1 x 64 B  2 x 64 B" in shown


def test_units_of_one_run_only_are_named():
    other = RunBuilder(units=("layers.0", "[red]head[/red]"))
    other.rank(0).step(0, 0, 100)
    shown = text_of_runs(run_of_step(100), other.build())
    assert "only in A: layers.1" in shown
    assert "only in B: [red]head[/red]" in shown


def test_memory_is_shown_by_category_where_it_is_known():
    runs = []
    for held in (1 << 20, 3 << 20):
        builder = RunBuilder(world_size=1)
        builder.rank(0).step(0, 0, 100)
        builder.rank(0).memory(MemoryPoint.PEAK, held, unsharded_parameter=held)
        runs.append(builder.build())
    shown = text_of_runs(*runs)
    assert "unsharded parameter  1.00 MiB  3.00 MiB  +2.00 MiB" in shown


def test_of_many_units_the_most_changed_are_named():
    names = tuple(f"layers.{number}" for number in range(9))
    runs = []
    for longer in (0, 1):
        builder = RunBuilder(units=names)
        rank = builder.rank(0)
        rank.step(0, 0, 1000)
        for place, name in enumerate(names):
            rank.all_gather(name, 100 * place, 100 * place + 10 + longer * place, need=100 * place)
        runs.append(builder.build())
    shown = text_of_runs(*runs)
    assert f"Units: {MOST_UNITS} of 9 with the largest change of exposed time" in shown
    assert "layers.8" in shown
    assert "layers.0\n" not in shown
