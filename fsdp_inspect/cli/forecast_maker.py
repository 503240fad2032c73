"""Make each forecast of a command once, in a child process, and print a line about it."""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import typer

from fsdp_inspect.error_text import shorten
from fsdp_inspect.errors import ForecastError, StoreError
from fsdp_inspect.formatting import plural
from fsdp_inspect.reading import InvalidTextError, parse_json
from fsdp_inspect.store.reader import StoredRun, open_run

TRAINER = "instrumented_trainer.forecasting:build"
_LOG = "forecast.log"
_NUM_TAIL_LINES = 15
_END_WAIT_S = 15.0


class ForecastMaker:
    """Makes each forecast once, and prints a line about it; see `make_forecasts`."""

    accepted: Sequence[str] | None
    """The settings that the builder accepts; None: any."""

    def __init__(
        self,
        child: "subprocess.Popen[str]",
        job: Mapping[str, Any],
        *,
        name: str,
        out: Path,
        scratch: Path,
        replaces: bool,
    ) -> None:
        from rich.console import Console

        self._child = child
        self._job = dict(job)
        self._name = name
        self._out = out
        self._scratch = scratch
        self._replaces = replaces
        self._console = Console(stderr=True)
        self._made: dict[str, StoredRun] = {}
        self.accepted = self._ask({**self._job, "path": None})["accepted"]

    def keep(self, world_size: int) -> StoredRun:
        """Make a forecast that the command shows, in the output folder."""
        key = f"{world_size}-ranks"
        return self._forecast(key, self._out / f"{self._name}-{key}", world_size, {})

    def try_out(
        self, world_size: int, changed: Mapping[str, Any], text: str | None = None
    ) -> StoredRun:
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
    ) -> StoredRun:
        if key not in self._made:
            ranks = plural(world_size, "rank")
            settings = _assignments(changed) if text is None else [text]
            what = ", ".join([f"forecasting {self._name} on {ranks}", *settings])
            if not self._console.is_terminal:
                self._console.print(f"{what} ...", soft_wrap=True, markup=False)
            with self._console.status(what) as status:
                if self._replaces:
                    _remove_forecast(path)
                self._made[key] = self.forecast(
                    path, world_size, changed, lambda text: status.update(f"{what}: {text}")
                )
        return self._made[key]

    def forecast(
        self,
        path: Path,
        world_size: int,
        settings: Mapping[str, Any],
        report: Callable[[str], None],
    ) -> StoredRun:
        """Make a forecast, and open it.

        Args:
            path: The run folder to create.
            world_size: Ranks of the job.
            settings: Settings that override those of the builder.
            report: Receives what the process does now.

        Raises:
            ForecastError: The forecast fails; the message states the reason.
        """
        changed = {**self._job["settings"], **settings}
        job = {**self._job, "path": str(path), "world_size": world_size, "settings": changed}
        self._ask(job, report)
        return open_run(path)

    def _ask(
        self, job: Mapping[str, Any], report: Callable[[str], None] | None = None
    ) -> dict[str, Any]:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        try:
            self._child.stdin.write(json.dumps(job) + "\n")
            self._child.stdin.flush()
            line = self._child.stdout.readline()
            while line and "progress" in (progress := json.loads(line)):
                if report is not None:
                    report(progress["progress"])
                line = self._child.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise ForecastError(
                f"The process that forecasts has ended with exit code {self._child.wait()}. "
                f"Expected an answer. The end of its output:\n\n{self._tail()}"
            )
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ForecastError(answer["error"])
        return answer

    def _tail(self) -> str:
        lines = (self._scratch / _LOG).read_text(errors="replace").splitlines()
        return "\n".join(lines[-_NUM_TAIL_LINES:])


def _assignments(changed: Mapping[str, Any]) -> list[str]:
    return [f"{name}={value}" for name, value in changed.items()]


def _remove_forecast(path: Path) -> None:
    """Remove an earlier forecast; a folder that is not a forecast stays."""
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
    """Run a child process that makes forecasts of a builder, until the block ends.

    Args:
        builder: `module:function`, found from the current folder.
        settings: Keyword arguments of the builder.
        name: The name of the forecasts.
        gpus_per_node: Ranks on one node.
        device_type: The device for which to choose kernels.
        out: The folder of the forecasts that the command shows; None: a temporary one.
        replaces: Whether forecasts of the same name in `out` are replaced.
    """
    job = {
        "builder": builder,
        "settings": dict(settings),
        "gpus_per_node": gpus_per_node,
        "device_type": device_type,
    }
    with tempfile.TemporaryDirectory(prefix="fsdp-inspect-") as temporary:
        scratch = Path(temporary)
        if out is not None:
            _make_folder(out)
        with (scratch / _LOG).open("w") as errors:
            child = subprocess.Popen(
                [sys.executable, "-m", "fsdp_inspect.emulation.forecast"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
            try:
                yield ForecastMaker(
                    child, job, name=name, out=out or scratch, scratch=scratch, replaces=replaces
                )
            finally:
                _end(child)


def _end(child: "subprocess.Popen[str]") -> None:
    assert child.stdin is not None
    child.kill()  # the child has no state to lose
    child.wait(_END_WAIT_S)
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            pipe.close()


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(
            f"{str(path)!r} cannot be made for the forecasts: {error.strerror or error}. Expected "
            "a folder that this user may write to. Name another --out."
        ) from error


def collect_settings(
    texts: Iterable[str], options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Parse the values of all `--set` of a command: one value for each name.

    Args:
        texts: `NAME=VALUE` each.
        options: Settings from other options of the command.
    """
    settings = {name: value for name, value in (options or {}).items() if value is not None}
    for text in texts:
        name, value = _parse_setting(text)
        if name in settings and repr(settings[name]) != repr(value):
            both = " and ".join(shorten(str(each)) for each in (settings[name], value))
            raise typer.BadParameter(
                f"{shorten(name)} is both {both}. Expected one value. Leave one out.",
                param_hint="--set",
            )
        settings[name] = value
    return settings


def _parse_setting(text: str) -> tuple[str, Any]:
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
