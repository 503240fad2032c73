"""`fsdp-inspect numerics`: show norms, values that are not finite, and lost updates."""

from fsdp_inspect.cli.arguments import JsonOption, RunArgument, open_run_argument, print_renderable


def numerics(run: RunArgument, as_json: JsonOption = False) -> None:
    """Show the numerics of each unit: norms, values that are not finite, lost updates.

    Record them with `--numerics-every N` (`Recorder(numerics_every=N)`). A lost update changed no
    stored parameter, because it is smaller than the rounding of the parameter's dtype.

    Example: `fsdp-inspect numerics runs/demo`
    """
    from fsdp_inspect.errors import MissingDataError
    from fsdp_inspect.report.json import render_run_json

    opened = open_run_argument(run)
    found = opened.numerics()
    if found is None:
        raise MissingDataError(
            f"Run {opened.id} has no numerics step. Expected a run recorded with --numerics-every "
            "N, or Recorder(numerics_every=N). Record it again with that option."
        )
    if as_json:
        print(render_run_json(opened.source, found))
        return
    from fsdp_inspect.report.text import render_numerics

    print_renderable(render_numerics(found))
