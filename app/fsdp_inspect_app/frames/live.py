"""Build tables of a live run."""

from collections.abc import Sequence

import pandas as pd

from fsdp_inspect.formatting import format_bytes, format_bytes_per_s
from fsdp_inspect.result_types import DeviceSeries, RankRecord


def frame_devices(series: Sequence[DeviceSeries]) -> pd.DataFrame:
    """All samples of the machine, one row for each."""
    rows = [
        {"what": one.label, "before the newest (s)": second, "value": value, "unit": one.unit}
        for one in series
        for second, value in zip(one.seconds, one.values, strict=True)
    ]
    return pd.DataFrame(rows, columns=["what", "before the newest (s)", "value", "unit"])


def frame_live_ranks(records: Sequence[RankRecord]) -> pd.DataFrame:
    """The ranks that record and the ranks that stopped."""
    return pd.DataFrame(
        [
            {
                "rank": record.rank,
                "state": record.status.value,
                "host": record.host,
                "device": record.device,
                "process": record.pid,
                "failure": record.failure or "",
            }
            for record in records
        ]
    )


def format_sample(value: float, unit: str) -> str:
    """One sample of the machine in its unit."""
    match unit:
        case "bytes":
            return format_bytes(value)
        case "bytes/s":
            return format_bytes_per_s(value)
        case "%":
            return f"{value:.0f}%"
        case _:
            return f"{value:,.0f} {unit}"
