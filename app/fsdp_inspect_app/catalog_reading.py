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
from fsdp_inspect.catalog.tables import setting_names
from fsdp_inspect.errors import CatalogError, StoreError
from fsdp_inspect_app.dated import Dated, is_younger_than

_LIFE_S = 3
_LIFE_AT_URL_S = 20
"""The time after which a catalog at a URL is looked up again, which takes two requests."""


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
    """The catalog in a folder of runs or at its URL; None: none, or it cannot be read."""
    read = _read_head_at_url if isinstance(folder, str) else _read_head
    head = read(str(folder)).value
    return None if head is None else _read_catalog(str(folder), head)


@st.cache_resource(validate=is_younger_than(_LIFE_S), max_entries=4, show_spinner=False)
def _read_head(folder: str) -> Dated[str | None]:
    return Dated(_generation_in(folder))


@st.cache_resource(validate=is_younger_than(_LIFE_AT_URL_S), max_entries=4, show_spinner=False)
def _read_head_at_url(url: str) -> Dated[str | None]:
    return Dated(_generation_in(url))


@st.cache_resource(max_entries=2, show_spinner="Reading the catalog")
def _read_catalog(folder: str, generation: str) -> KnownCatalog | None:
    try:
        catalog = open_catalog(folder)
        runs = catalog.runs().to_arrow()
        return KnownCatalog(catalog, runs, setting_names(runs))
    except (CatalogError, StoreError):
        return None


def _generation_in(folder: str) -> str | None:
    try:
        head = open_catalog(folder).head
    except (CatalogError, StoreError):
        return None
    return head.generation if head.runs == IN_RUNS else None
