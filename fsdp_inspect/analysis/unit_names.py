"""Find a unit by its name."""

from fsdp_inspect.error_text import suggest
from fsdp_inspect.errors import MissingDataError
from fsdp_inspect.formatting import format_unit
from fsdp_inspect.trace.run import RunManifest, Unit


def find_unit(manifest: RunManifest, name: str) -> Unit:
    """Return the unit with this name; `(root)` or the empty string is the root.

    Raises:
        MissingDataError: The run has no such unit. The message lists the closest names.
    """
    units = {format_unit(unit.fqn): unit for unit in manifest.units}
    found = units.get(format_unit(name))
    if found is None:
        nearest = suggest(name, list(units), what="units")
        raise MissingDataError(
            f"Unit {name!r} not found in run {manifest.run_id!r}. {nearest} `fsdp-inspect units "
            "RUN` lists all units."
        )
    return found
