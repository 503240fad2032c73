"""Build the table of the ranks of a diagnosis."""

import pandas as pd

from fsdp_inspect.report.diagnosis import diagnosis_to_dict
from fsdp_inspect.result_types import Diagnosis
from fsdp_inspect.store.reduction.order_wording import shorten_place

_COLUMNS = {
    "rank": "rank",
    "end": "end",
    "step": "step",
    "phase": "phase",
    "last_collective": "last collective",
    "waits": "waits",
    "idle_s": "seconds without a collective",
    "activity": "activity",
    "location": "line",
    "failure": "failure",
}


def frame_rank_states(found: Diagnosis) -> pd.DataFrame:
    """One row for each rank: its end, its last collective, and its activity."""
    rows = diagnosis_to_dict(found)["states"]
    for row in rows:
        row["location"] = shorten_place(row["location"] or "")
    return pd.DataFrame(rows, columns=list(_COLUMNS)).rename(columns=_COLUMNS)
