"""Read the catalog of the folder of runs, if `fsdp-inspect index` has written one.

A catalog makes the lists of runs quick. It is optional, and may be out of date: the pages check the
files of each run against its fingerprint, and read changed runs themselves.
"""

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import streamlit as st

from fsdp_inspect.catalog.catalog import Catalog, open_catalog
from fsdp_inspect.catalog.generations import code_version
from fsdp_inspect.catalog.index import IN_RUNS
from fsdp_inspect.catalog.run_settings import setting_names
from fsdp_inspect.errors import CatalogError
from fsdp_inspect_app.dated import Dated, is_younger_than

_LIFE_S = 3


@dataclass(frozen=True, slots=True)
class KnownCatalog:
    """The current generation of the catalog, in memory."""

    catalog: Catalog
    runs: pa.Table
    settings: list[str]
    """The names of all settings."""

    @property
    def generation(self) -> str:
        """Identifies the contents."""
        return self.catalog.head.generation

    @property
    def is_of_this_code(self) -> bool:
        """Whether this version of the code computed the numbers."""
        return self.catalog.head.written_by == code_version()


def find_catalog(folder: Path | str) -> KnownCatalog | None:
    """The catalog in a folder of runs; None: none, it cannot be read, or the folder is a URL."""
    if isinstance(folder, str):
        return None
    head = _read_head(str(folder)).value
    return None if head is None else _read_catalog(str(folder), head)


@st.cache_resource(validate=is_younger_than(_LIFE_S), max_entries=4, show_spinner=False)
def _read_head(folder: str) -> Dated[str | None]:
    try:
        head = open_catalog(folder).head
    except CatalogError:
        return Dated(None)
    return Dated(head.generation if head.runs == IN_RUNS else None)


@st.cache_resource(max_entries=2, show_spinner="Reading the catalog")
def _read_catalog(folder: str, generation: str) -> KnownCatalog | None:
    try:
        catalog = open_catalog(folder)
        runs = catalog.runs().to_arrow()
        return KnownCatalog(catalog, runs, setting_names(runs))
    except CatalogError:
        return None
