"""Build tables of traces and snapshots to import."""

from collections.abc import Sequence

import pandas as pd

from fsdp_inspect_app.frames.values import mib
from fsdp_inspect_app.import_sources import ImportSource


def frame_sources(sources: Sequence[ImportSource]) -> pd.DataFrame:
    """One row for each file or folder."""
    return pd.DataFrame(
        [
            {
                "name": source.name,
                "what": source.kind.value,
                "files": source.num_files,
                "size (MiB)": mib(source.num_bytes),
            }
            for source in sources
        ]
    )
