"""Count what a token multiplies in a model, from the recorded shapes of its parameters."""

import math

from fsdp_inspect.trace.run import RunManifest

_QUERY_NAMES = ("q_proj.weight", "wq.weight")
"""The ends of the names of a query projection, whose matrix has one row for each query channel."""


def count_matrix_elements(manifest: RunManifest) -> int:
    """Count the elements of the matrices that a token multiplies: all but embeddings."""
    return sum(
        math.prod(shape)
        for unit in manifest.units
        for name, shape in unit.parameters.items()
        if len(shape) == 2 and "embed" not in name
    )


def count_query_channels(manifest: RunManifest) -> int:
    """Count the query channels of all blocks; 0 without a query projection with a known name.

    For each token, causal attention multiplies each channel by half of the sequence, twice.
    """
    return sum(
        shape[0]
        for unit in manifest.units
        for name, shape in unit.parameters.items()
        if len(shape) == 2 and name.endswith(_QUERY_NAMES)
    )
