"""One catalog of all runs in a folder: tables of runs, units, ranks and steps, with SQL."""
