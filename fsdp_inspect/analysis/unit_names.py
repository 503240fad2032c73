"""Which unit does a name that somebody typed stand for?"""

from fsdp_inspect.error_text import suggest
from fsdp_inspect.errors import MissingDataError
from fsdp_inspect.formatting import format_unit
from fsdp_inspect.trace.run import RunManifest, Unit


def find_unit(manifest: RunManifest, name: str) -> Unit:
    """The unit of that name; the root is `(root)` or the empty text.

    Raises:
        MissingDataError: The run has none; the message names the nearest.
    """
    units = {format_unit(unit.fqn): unit for unit in manifest.units}
    found = units.get(format_unit(name))
    if found is None:
        nearest = suggest(name, list(units), what="units")
        raise MissingDataError(
            f"Run {manifest.run_id!r} has no unit {name!r}. {nearest} `fsdp-inspect units RUN` "
            "lists them all."
        )
    return found
