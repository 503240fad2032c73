"""Make each forecast of a command once, in a child process, and print a line about it."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from fsdp_inspect.reading import InvalidTextError, parse_json

if TYPE_CHECKING:
    from fsdp_inspect.cli.forecaster import Forecaster
    from fsdp_inspect.store.reader import StoredRun

TRAINER = "instrumented_trainer.forecasting:build"


class ForecastMaker:
    """Makes each forecast once, and prints a line about it."""

    def __init__(
        self, forecaster: "Forecaster", name: str, *, out: Path, scratch: Path, replaces: bool
    ) -> None:
        from rich.console import Console

        self._forecaster = forecaster
        self._name = name
        self._out = out
        self._scratch = scratch
        self._replaces = replaces
        self._console = Console(stderr=True)
        self._made: dict[str, StoredRun] = {}
        self.accepted = forecaster.accepted_settings()

    def keep(self, world_size: int) -> "StoredRun":
        """Make a forecast that the command shows, in the output folder."""
        key = f"{world_size}-ranks"
        return self._forecast(key, self._out / f"{self._name}-{key}", world_size, {})

    def try_out(
        self, world_size: int, changed: Mapping[str, Any], text: str | None = None
    ) -> "StoredRun":
        """Make an intermediate forecast with changed settings, in a temporary folder.

        Args:
            world_size: The number of ranks.
            changed: The settings.
            text: The settings in the line about it; None: all.
        """
        key = "-".join([f"{world_size}-ranks", *_assignments(dict(sorted(changed.items())))])
        path = self._scratch / f"{self._name}-{len(self._made)}"
        return self._forecast(key, path, world_size, changed, text)

    def _forecast(
        self,
        key: str,
        path: Path,
        world_size: int,
        changed: Mapping[str, Any],
        text: str | None = None,
    ) -> "StoredRun":
        if key not in self._made:
            ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
            settings = _assignments(changed) if text is None else [text]
            what = ", ".join([f"forecasting {self._name} on {ranks}", *settings])
            if not self._console.is_terminal:
                self._console.print(f"{what} ...", soft_wrap=True, markup=False)
            with self._console.status(what):
                if self._replaces:
                    _remove_forecast(path)
                self._made[key] = self._forecaster.forecast(path, world_size, changed)
        return self._made[key]


def _assignments(changed: Mapping[str, Any]) -> list[str]:
    return [f"{name}={value}" for name, value in changed.items()]


def _remove_forecast(path: Path) -> None:
    """Remove an earlier forecast; a folder that is not a forecast stays."""
    import shutil

    from fsdp_inspect.errors import StoreError
    from fsdp_inspect.store.reader import open_run

    if not path.exists():
        return
    if open_run(path).manifest.source != "predicted":
        raise StoreError(
            f"{str(path)!r} is not a forecast, so --force does not replace it. Name another --out."
        )
    shutil.rmtree(path)


@contextmanager
def make_forecasts(  # noqa: PLR0913 - the options of one command
    builder: str,
    settings: Mapping[str, Any],
    *,
    name: str,
    gpus_per_node: int,
    device_type: Literal["cuda", "cpu"] = "cuda",
    out: Path | None = None,
    replaces: bool = False,
) -> Iterator[ForecastMaker]:
    """Make forecasts of a builder until the block ends.

    Args:
        builder: `module:function`, found from the current folder.
        settings: Keyword arguments of the builder.
        name: The name of the forecasts.
        gpus_per_node: Ranks on one node.
        device_type: The device for which to choose kernels.
        out: The folder of the forecasts that the command shows; None: a temporary one.
        replaces: Whether forecasts of the same name in `out` are replaced.
    """
    from fsdp_inspect.cli.forecaster import start_forecaster

    with tempfile.TemporaryDirectory(prefix="fsdp-inspect-") as temporary:
        scratch = Path(temporary)
        if out is not None:
            _make_folder(out)
        with start_forecaster(
            builder, settings, gpus_per_node=gpus_per_node, device_type=device_type
        ) as forecaster:
            yield ForecastMaker(
                forecaster, name, out=out or scratch, scratch=scratch, replaces=replaces
            )


def _make_folder(path: Path) -> None:
    from fsdp_inspect.errors import StoreError

    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(
            f"{str(path)!r} cannot be made for the forecasts: {error.strerror or error}. Expected "
            "a folder that this user may write to. Name another --out."
        ) from error


def parse_setting(text: str) -> tuple[str, Any]:
    """Parse `NAME=VALUE`; the value is JSON or text."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise typer.BadParameter(
            f"{text!r} is not a setting. Expected a name and a value, like batch_size=2.",
            param_hint="--set",
        )
    try:
        return name.replace("-", "_"), parse_json(value)
    except InvalidTextError:
        return name.replace("-", "_"), value
