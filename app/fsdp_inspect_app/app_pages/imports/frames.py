"""Build tables of traces and snapshots to import."""

from collections.abc import Sequence

import pandas as pd

from fsdp_inspect_app.app_pages.imports.sources import ImportSource
from fsdp_inspect_app.tables import mib


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
