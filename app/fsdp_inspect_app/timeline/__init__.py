"""Draw one step on a canvas: lanes for each rank, level of detail on the server."""
