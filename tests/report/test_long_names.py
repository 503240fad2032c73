"""Tables with unit names of 60 characters at 80 columns: short names, all columns, one prefix."""

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from fsdp_inspect.analysis.memory.overview import measure_memory_overview
from fsdp_inspect.analysis.rank_waits import measure_rank_waits
from fsdp_inspect.analysis.summary import measure_summary
from fsdp_inspect.analysis.units import measure_units
from fsdp_inspect.comparison.comparison import compare_runs
from fsdp_inspect.formatting import ELLIPSIS, shorten_names
from fsdp_inspect.report.comparison import render_comparison
from fsdp_inspect.report.exposed import render_waits
from fsdp_inspect.report.memory_wording import render_memory
from fsdp_inspect.report.simulation import render_simulation
from fsdp_inspect.report.text import render_summary, render_units
from fsdp_inspect.simulation.recorded import Execution, observed_plan
from fsdp_inspect.simulation.simulate import simulate_plan
from fsdp_inspect.trace.codes import MemoryPoint, Phase
from tests.builders import MIB, RunBuilder, steady_run
from tests.report.terminal_text import text_of
from tests.simulation.test_recorded import as_run, simple

PREFIX = "language_model.decoder.checkpointed.decoder_modules."
LINE = f"Unit names: ... is {PREFIX}\n"


def with_long_names(run):
    """The same run with units below modules with long names."""
    units = [
        unit.model_copy(update={"fqn": f"{PREFIX}{unit.fqn}"}) if unit.fqn else unit
        for unit in run.manifest.units
    ]
    return replace(run, manifest=run.manifest.model_copy(update={"units": units}))


def table_under(title, text):
    """The lines of one section without its title."""
    section = next(part for part in text.split("\n\n") if part.startswith(title))
    return section.partition("\n")[2] + "\n"


def tracked_run():
    builder = RunBuilder(memory_steps=[1], world_size=1)
    rank = builder.rank(0)
    rank.step(1, 0, 100, is_memory_step=True)
    rank.memory(
        MemoryPoint.PEAK, 100 * MIB, unit="layers.1", phase=Phase.BACKWARD, activation=70 * MIB
    )
    rank.memory(MemoryPoint.PEAK_BY_OWNER, 60 * MIB, unit="layers.0", activation=60 * MIB)
    rank.memory(MemoryPoint.FORWARD_END, 30 * MIB, unit="layers.1", phase=Phase.FORWARD)
    return with_long_names(builder.build())


def simulated_run():
    run = as_run(simple(3), Execution.HOST)
    simulation = simulate_plan(run, observed_plan(run))
    units = tuple(replace(unit, fqn=f"{PREFIX}{unit.fqn}") for unit in simulation.predicted.units)
    return replace(simulation, predicted=replace(simulation.predicted, units=units))


TABLES = {
    ("summary", "Largest waits of rank"): """\
unit         collective      phase     in flight  exposed   floor
...layers.0  reduce-scatter  backward     100 ns   100 ns  100 ns
...layers.0  all-gather      forward       50 ns    50 ns   50 ns
...layers.1  all-gather      forward      150 ns    50 ns    0 ns
...layers.1  all-gather      backward      30 ns    30 ns    0 ns
(not FSDP)   all-reduce      backward      20 ns    20 ns    0 ns
""",
    ("exposed", "By unit"): """\
unit         collective      phase     exposed  causes
...layers.0  reduce-scatter  backward   100 ns  floor 100%
...layers.0  all-gather      forward     50 ns  floor 100%
...layers.1  all-gather      forward     50 ns  transfer 80%, late issue 20%
...layers.1  all-gather      backward    30 ns  late issue 100%
(not FSDP)   all-reduce      backward    20 ns  transfer 100%
""",
    ("exposed", "Longest wait of each"): """\
step  collective                    issued  needed  ended  exposed  main cause
1     ...layers.0 reduce-scatter     0.001   0.001  0.001   100 ns  floor
      (backward)
1     ...layers.0 all-gather         0.000   0.000  0.000    50 ns  floor
      (forward)
1     ...layers.1 all-gather         0.000   0.000  0.000    50 ns  transfer
      (forward)
1     ...layers.1 all-gather         0.000   0.000  0.000    30 ns  late issue
      (backward)
1     (not FSDP) all-reduce          0.001   0.001  0.001    20 ns  transfer
      (backward)
""",
    ("exposed", "All-gathers"): """\
unit         phase     issued      lead  in flight  hidden
...layers.0  forward   first       0 ns      50 ns      0%
...layers.0  backward  explicit  110 ns      70 ns    100%
...layers.1  forward   explicit  100 ns     150 ns   66.7%
...layers.1  backward  missed      0 ns      30 ns      0%
""",
    ("units", "Collectives of each"): """\
unit         collective      n  message  duration  exposed       bus
...layers.0  all-gather      2     64 B     60 ns    50 ns  533 MB/s
...layers.0  reduce-scatter  1     64 B    100 ns   100 ns  320 MB/s
...layers.1  all-gather      2     64 B     90 ns    80 ns  356 MB/s
...layers.1  reduce-scatter  1     64 B     80 ns     0 ns  400 MB/s
""",
    ("units", "Compute and copies"): """\
unit         params  forward  backward  recompute  copies  prefetched
...layers.0     100   100 ns    160 ns       0 ns   10 ns           1
...layers.1     100   100 ns    160 ns       0 ns   10 ns           1
""",
    ("memory", "Memory at the peak by unit"): """\
unit         at the peak  most of it  in this category
...layers.0     60.0 MiB  activation          60.0 MiB
""",
    ("memory", "Highest readings"): """\
unit         phase     step  allocated
...layers.1  backward     1    100 MiB
...layers.1  forward      1   30.0 MiB
""",
    ("compare", "Units: 2"): """\
unit                  A exposed      bus      B exposed      bus
...layers.0
  all-gather      60 ns   50 ns 533 MB/s  60 ns   50 ns 533 MB/s
  reduce-scatter 100 ns  100 ns 320 MB/s 100 ns  100 ns 320 MB/s
  forward        100 ns                  100 ns
  backward       160 ns                  160 ns
...layers.1
  all-gather      90 ns   80 ns 356 MB/s  90 ns   80 ns 356 MB/s
  reduce-scatter  80 ns    0 ns 400 MB/s  80 ns    0 ns 400 MB/s
  forward        100 ns                  100 ns
  backward       160 ns                  160 ns
""",
    ("simulate", ""): """\
unit         params  unsharded  gathers  all-gather  exposed
...layers.0   1.00M   3.81 MiB        2     2.00 ms  5.00 ms
...layers.1   1.00M   3.81 MiB        2     2.00 ms  2.00 ms
...layers.2   1.00M   3.81 MiB        2     2.00 ms  4.00 ms
""",
}
"""The tables below the line that states the prefix, by report and title."""


@pytest.fixture(scope="module")
def reports():
    run, other = with_long_names(steady_run()), with_long_names(steady_run(run_id="b"))
    return {
        "summary": text_of(render_summary(measure_summary(run))),
        "exposed": text_of(render_waits(measure_rank_waits(run))),
        "units": text_of(render_units(measure_units(run))),
        "memory": text_of(render_memory(measure_memory_overview(tracked_run()))),
        "compare": text_of(render_comparison(compare_runs(run, other))),
        "simulate": "\n\n\n" + text_of(render_simulation(simulated_run())).partition("\n\n")[2],
    }


@pytest.mark.parametrize(("report", "title"), TABLES)
def test_a_table_states_the_prefix_of_long_names_and_keeps_its_columns(reports, report, title):
    expected = LINE + TABLES[report, title]
    shown = reports[report]
    table = table_under(title, shown) if title else shown[shown.index("Unit names: ") :]
    assert table.startswith(expected)
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_names_have_60_characters():
    assert len(f"{PREFIX}layers.0") == 60


PART = st.text("ab.0", max_size=3) | st.sampled_from(["layers", "0", "1", "a", "b", "...a"])
NAME = st.lists(PART, min_size=1, max_size=6).map(".".join)
UNIT = st.lists(NAME, min_size=1, max_size=3).map(", ".join) | st.just("(root)")


@given(st.lists(UNIT, max_size=8, unique=True), st.integers(0, 20))
def test_shortened_names_stay_distinct_and_end_as_their_originals(names, longest):
    short = shorten_names(names, longest)
    shown = [short(name) for name in names]
    assert len(set(shown)) == len(names)
    for name, text in zip(names, shown, strict=True):
        assert name.endswith(text.rpartition(", ")[2].removeprefix(ELLIPSIS))
        for module, shown_module in zip(name.split(", "), text.split(", "), strict=True):
            whole = short.prefix + shown_module.removeprefix(ELLIPSIS)
            assert module in (shown_module, whole)


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        pytest.param(
            ["model.decoder.layers.0.mlp", "model.decoder.layers.1.mlp"],
            ["...layers.0.mlp", "...layers.1.mlp"],
            id="up to the list of blocks",
        ),
        pytest.param(["layers.0", "layers.10"], ["layers.0", "layers.10"], id="short names stay"),
        pytest.param(
            ["(root)", "model.decoder.layers.0", "model.norm, model.lm_head"],
            ["(root)", "...decoder.layers.0", "...norm, ...lm_head"],
            id="the prefix that saves most, in units of several modules too",
        ),
        pytest.param(
            ["a_very_long_name_without_dots"], ["a_very_long_name_without_dots"], id="flat"
        ),
        pytest.param(
            ["all_reduce 25.0 MiB", "all_reduce 25.3 MiB (2)"],
            ["all_reduce 25.0 MiB", "all_reduce 25.3 MiB (2)"],
            id="the dot of a number",
        ),
    ],
)
def test_names_lose_the_prefix_that_they_share(names, shown):
    short = shorten_names(names)
    assert [short(name) for name in names] == shown
