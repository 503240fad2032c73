"""The search of `fsdp-inspect plan` as a part of a page: machines and a budget to a plan.

The choices stand in the address. The models are the presets, because a path of a config file would
let a visitor read files of the server.
"""

import shlex
from collections.abc import Iterable, Sequence
from functools import partial

import pandas as pd
import streamlit as st

from fsdp_inspect.errors import FsdpInspectError
from fsdp_inspect.hardware import GPUS
from fsdp_inspect.quantities import parse_bytes
from fsdp_inspect.report.planning import (
    FOUND_HEADS,
    FOUND_TITLE,
    REJECTION_HEADS,
    VALUE_HEADS,
    answer_plan,
    describe_assumptions,
    describe_candidate,
    describe_search,
    describe_shortfall,
    describe_undecided,
    found_rows,
    rejection_rows,
    value_rows,
)
from fsdp_inspect.simulation.planning.candidates import Job
from fsdp_inspect.simulation.planning.machines import make_machine
from fsdp_inspect.simulation.planning.search import CapacityPlan, make_capacity_plan
from fsdp_inspect.simulation.planning.transformer import list_presets, load_model
from fsdp_inspect_app.cards import show_code, show_note, show_table, show_text, show_title
from fsdp_inspect_app.page_sheet import sheet_section
from fsdp_inspect_app.selection import follow, link, pick
from fsdp_inspect_app.wording import plain

_ALL_MEMORY = "all"
_GPUS = tuple(str(1 << power) for power in range(13))
_MEMORY = (_ALL_MEMORY, "24GiB", "40GiB", "48GiB", "64GiB", "80GiB", "96GiB", "120GiB")
_TOKENS = ("1e9", "15e9", "100e9", "1e12", "15e12")
_SEQUENCES = ("2048", "4096", "8192", "16384", "32768", "131072")
_SEARCHED = "plan_search"
"""The parameter of the address that opens the result."""
_SEARCHED_VALUE = "yes"
_pick = partial(pick, is_default_hidden=True)


@st.fragment
@sheet_section("capacity")
def show_capacity_search(preset: str) -> None:
    """Show the choices, and the plan for them once the user asked for it.

    Args:
        preset: The preset of the run's model, if it has one.
    """
    models = tuple(list_presets())
    if not models:
        return  # without the trainer there are no presets
    follow(_SEARCHED, _SEARCHED, {_SEARCHED_VALUE: True}, default=False)
    is_searched = bool(st.session_state[_SEARCHED])
    with st.expander("Plan for a budget of GPUs", expanded=is_searched, key="capacity"):
        first, second, third = st.columns(3)
        with first:
            usual = preset if preset in models else models[0]
            model = _pick("Model", models, usual, name="plan_model")
            seq_len = _pick("Sequence, tokens", _SEQUENCES, "8192", name="plan_seq_len")
        with second:
            machines = _pick("Machines", tuple(GPUS), "h200-ib400", name="plan_machines")
            memory = _pick("Memory of a device", _MEMORY, _ALL_MEMORY, name="plan_memory")
        with third:
            gpus = _pick("GPUs", _GPUS, "64", name="plan_gpus")
            tokens = _pick("Tokens of the training", _TOKENS, "15e9", name="plan_tokens")
        if st.button("Search plans", icon=":material/search:", type="primary"):
            is_searched = True
            st.session_state[_SEARCHED] = True
        link(_SEARCHED, _SEARCHED_VALUE if is_searched else None)
        if is_searched:
            _show_answer(model, machines, int(gpus), memory, float(tokens), int(seq_len))
            show_note("The same in a terminal, with forecasts of the best plans:")
            limit = "" if memory == _ALL_MEMORY else f" --memory {memory}"
            show_code(
                f"fsdp-inspect plan --model {shlex.quote(model)} --gpus {gpus} --preset {machines}"
                f"{limit} --tokens {tokens} --seq-len {seq_len} --out plan",
                key="capacity-command",
            )


def _show_answer(
    model: str, machines: str, gpus: int, memory: str, tokens: float, seq_len: int
) -> None:
    try:
        plan = _search(model, machines, gpus, memory, tokens, seq_len)
    except FsdpInspectError as error:
        st.warning(plain(str(error)), icon=":material/warning:")
        return
    show_title(answer_plan(plan))
    for sentence in describe_shortfall(plan):
        show_text(plain(sentence))
    shown = plan.found.best or plan.found.undecided
    if plan.found.best is not None:
        show_text(plain(f"Plan: {describe_candidate(plan.found.best.candidate)}."))
    if plan.found.undecided is not None:
        show_title("Cannot tell")
        for sentence in describe_undecided(plan):
            show_text(plain(sentence))
    if shown is not None:
        _show_rows("Predicted values", VALUE_HEADS, value_rows(shown), key="capacity-values")
    if plan.found.best is not None:
        _show_rows(FOUND_TITLE, FOUND_HEADS, found_rows(plan), key="capacity-found")
    _show_rows("Rejected", REJECTION_HEADS, rejection_rows(plan), key="capacity-rejected")
    if shown is not None:
        show_title("Assumptions")
        for sentence in describe_assumptions(shown):
            show_text(plain(sentence))
    show_note(plain(describe_search(plan)))


def _show_rows(
    title: str, heads: Sequence[str], rows: Iterable[tuple[str, ...]], *, key: str
) -> None:
    columns = [head.removeprefix("<") or "value of" for head in heads]
    show_title(title)
    show_table(pd.DataFrame(list(rows), columns=columns), key=key, alt=title)


@st.cache_data(max_entries=32, show_spinner="Comparing plans")
def _search(
    model: str, machines: str, gpus: int, memory: str, tokens: float, seq_len: int
) -> CapacityPlan:
    """The plan, without forecasts: they take up to a minute each."""
    shape, _ = load_model(model)
    budget = None if memory == _ALL_MEMORY else parse_bytes(memory)
    machine = make_machine(machines, memory_bytes=budget)
    job = Job(
        model=shape,
        gpus=gpus,
        gpus_per_node=machine.speed.links.gpus_per_node,
        seq_len=seq_len,
        tokens=tokens,
        batch_tokens=None,
    )
    return make_capacity_plan(job, machine, machines)
