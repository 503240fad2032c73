"""Filter and group runs by any fact or setting of the catalog."""

from collections.abc import Sequence

import pandas as pd
import streamlit as st

from fsdp_inspect.catalog.tables import values_of_setting
from fsdp_inspect.catalog.trends import matches
from fsdp_inspect.result_types import RunEntry
from fsdp_inspect_app.cards import show_csv_button, show_table
from fsdp_inspect_app.catalog_reading import KnownCatalog
from fsdp_inspect_app.selection import follow_all, link, pick
from fsdp_inspect_app.tables import mib, ms

NO_SETTING = "(none)"
_MOST_VALUES = 1_000


def pick_filter(catalog: KnownCatalog) -> dict[str, list[str]]:
    """Show the pickers of a setting and its values; returns the chosen values by setting."""
    setting = _pick_setting(catalog, "Filter by setting", "setting")
    if setting == NO_SETTING:
        link("value", None)
        return {}
    values = _values(catalog, setting)
    follow_all("value", f"value of {setting}", {value: value for value in values}, [])
    chosen = st.multiselect(
        "Values", values, key=f"value of {setting}", placeholder="all values", width="stretch"
    )
    link("value", chosen or None)
    return {setting: chosen} if chosen else {}


def _pick_setting(catalog: KnownCatalog, label: str, name: str) -> str:
    options = [NO_SETTING, *catalog.settings]
    return pick(label, options, NO_SETTING, name=name, is_default_hidden=True, width="stretch")


def _values(catalog: KnownCatalog, setting: str) -> list[str]:
    found = values_of_setting(catalog.runs, setting)
    return sorted({value for values in found for value in values})[:_MOST_VALUES]


def choose_by_setting(catalog: KnownCatalog, entries: Sequence[RunEntry]) -> list[RunEntry]:
    """Show the filter and the groups; returns the runs that match the filter."""
    with st.container(horizontal=True, vertical_alignment="bottom"):
        group = _pick_setting(catalog, "Group by", "group")
        where = pick_filter(catalog)
    keep = dict(zip(catalog.runs["run"].to_pylist(), matches(catalog.runs, where), strict=True))
    matching = [entry for entry in entries if keep.get(entry.id, not where)]
    if group != NO_SETTING and matching:
        frame = frame_groups(catalog, matching, group)
        show_table(frame, key="groups", alt=f"The runs by {group}")
        show_csv_button(frame, key="groups")
    return matching


def frame_groups(catalog: KnownCatalog, entries: Sequence[RunEntry], setting: str) -> pd.DataFrame:
    """One row for each value of a setting: the number of its runs, and medians of their numbers."""
    shown = {entry.id for entry in entries}
    names = ("run", "step_time_ns", "exposed_ns", "peak_allocated_bytes")
    frame = pd.DataFrame(
        {name: catalog.runs[name].to_pandas() for name in names}
        | {setting: [", ".join(one) for one in values_of_setting(catalog.runs, setting)]}
    )
    groups = frame[frame["run"].isin(shown)].groupby(setting, sort=True)
    medians = groups[list(names[1:])].median()
    return pd.DataFrame(
        {
            setting: [value or "(unknown)" for value in medians.index],
            "runs": groups.size().to_numpy(),
            "fastest step time (ms)": [_ms(one) for one in groups["step_time_ns"].min()],
            "median step time (ms)": [_ms(one) for one in medians["step_time_ns"]],
            "median exposed (ms)": [_ms(one) for one in medians["exposed_ns"]],
            "median peak (MiB)": [
                None if pd.isna(one) else mib(round(one)) for one in medians["peak_allocated_bytes"]
            ],
        }
    )


def _ms(value: float) -> float | None:
    return None if pd.isna(value) else ms(round(value))
