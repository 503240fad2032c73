"""Page Diagnosis: what went wrong, the culprit among the ranks, their stacks, and what to do."""

from collections.abc import Mapping, Sequence

import streamlit as st

from fsdp_inspect import Run
from fsdp_inspect.analysis.run_heading import measure_run_heading
from fsdp_inspect.report.diagnosis import (
    describe_diagnosis,
    headline_diagnosis,
)
from fsdp_inspect.report.diagnosis_pictures import (
    MOST_STACKS,
    describe_columns,
    fold_stack,
    stack_title,
)
from fsdp_inspect.report.out_of_memory import describe_fitting_plans
from fsdp_inspect.result_types import Diagnosis, RunEntry, RunHeading, StackGroup
from fsdp_inspect_app import loading
from fsdp_inspect_app.app_pages.diagnosis.charts import draw_grid, draw_stack, frame_rank_states
from fsdp_inspect_app.banner import show_run_header
from fsdp_inspect_app.cards import (
    show_card,
    show_headline,
    show_markup,
    show_note,
    show_section,
    show_table_card,
    show_text,
)
from fsdp_inspect_app.selection import STEP_KEY, entry_or_stop, page_link
from fsdp_inspect_app.wording import plain

_CELLS = (
    "Done: the collective, or a later one, has finished. Waits: the rank has issued it, and it has "
    "not finished. A cell with a name: the rank issued that collective instead."
)


def show_page(entry: RunEntry, run: Run, heading: RunHeading, found: Diagnosis) -> None:
    """Show the answer, what to do, the picture, the stacks, and the state of each rank."""
    show_run_header(run.manifest, heading, is_diagnosis=True)
    text = describe_diagnosis(found, run=str(entry.path))
    show_headline(plain(headline_diagnosis(found)))
    show_text(plain(text.detail))
    if text.earlier:
        show_note(plain(text.earlier))
    _show_next(text.next, found, run.steps.finished)
    _show_plans(found)
    _show_grid(found)
    _show_stacks(found.stacks)
    _show_evidence(text.evidence)
    _show_ranks(found)
    _show_unchecked(run.correctness().not_checked)
    if heading.notes:
        with st.expander("Notes of the run"):
            show_text("\n".join(f"- {plain(note)}" for note in heading.notes))


def _show_unchecked(reasons: Mapping[str, str]) -> None:
    """The checks of the training without an answer, by reason."""
    names: dict[str, list[str]] = {}
    for name, why in reasons.items():
        names.setdefault(why, []).append(name)
    if names:
        with st.expander(f"Checks of the training without an answer: {len(reasons)}"):
            lines = (f"{', '.join(each)}: {why}" for why, each in names.items())
            show_text("\n".join(f"- {plain(line)}" for line in lines))


def _show_next(steps: Sequence[str], found: Diagnosis, finished: Sequence[int]) -> None:
    if steps:
        show_section("Next")
        show_text("\n".join(f"- {plain(step)}" for step in steps))
    before = [step for step in finished if found.step is None or step <= found.step]
    if before and found.is_problem and found.training is None:
        last = before[-1]
        label = f"Open the timeline of step {last}" + (
            ", the last that ended before" if last != found.step else ""
        )
        page_link("timeline", label, **{STEP_KEY: last})


def _show_plans(found: Diagnosis) -> None:
    if found.out_of_memory is None or found.plans is None:
        return
    with show_card("Plans that fit", key="diagnosis-plans"):
        lines = describe_fitting_plans(found.out_of_memory, found.plans)
        show_text("\n".join(f"- {plain(line)}" for line in lines))


def _show_grid(found: Diagnosis) -> None:
    if found.grid is None or found.problem is None:
        return  # without a problem, all columns are equal
    note = " ".join(filter(None, [_CELLS, describe_columns(found.grid, found)]))
    with show_card("Ranks against collectives", key="diagnosis-grid", note=note):
        show_markup(draw_grid(found.grid, found))


def _show_stacks(stacks: Sequence[StackGroup]) -> None:
    shown = stacks[:MOST_STACKS]
    for column, group in zip(st.columns(len(shown)) if shown else (), shown, strict=True):
        with (
            column,
            show_card(stack_title(group), key=f"diagnosis-stack-{group.ranks[0]}"),
        ):
            show_markup(draw_stack(fold_stack(group)))
    if len(stacks) > len(shown):
        rest = len(stacks) - len(shown)
        show_note(f"{rest} more stacks are in stacks\\.txt of the ranks\\.")


def _show_evidence(evidence: Sequence[str]) -> None:
    if evidence:
        with show_card("Evidence", key="diagnosis-evidence"):
            show_text("\n".join(f"- {plain(line)}" for line in evidence))


def _show_ranks(found: Diagnosis) -> None:
    if found.states:
        show_table_card(
            f"Ranks: {len(found.states)}",
            frame_rank_states(found),
            key="diagnosis-ranks",
            alt="The ranks, one row each",
        )


def _heading(entry: RunEntry) -> RunHeading:
    return loading.result_of(entry, measure_run_heading)


entry = entry_or_stop(_heading)
show_page(
    entry, loading.open_entry(entry), _heading(entry), loading.read_diagnosis_with_plans(entry)
)
