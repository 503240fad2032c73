"""Run independent tasks in this process, in threads, or on a Dask cluster."""
