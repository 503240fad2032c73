"""The README's pictures of every page, light and dark: `make screenshots`.

Two emulated runs of the trainer that differ in one setting, a run that hung in its data loader, and
the samples, in one folder; one more run is being recorded while its Live page is pictured. What-if
shows a run on virtual time, so that its predicted step does not depend on the load of the machine.
Trends shows synthetic runs. Pictures are reduced to 256 colours.
"""

import argparse
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from fsdp_inspect.store.folder import list_runs
from tests.browser.conftest import CHROMIUM_ARGUMENTS, SAMPLES, Dashboard, Scheme, serve
from tests.browser.nightly_runs import write_nights
from tests.browser.settling import prepare
from tests.browser.states import write_traces
from tests.studies.faults.cases import Case
from tests.studies.faults.running import run_case

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
WIDTH, TALLEST = 1280, 1500
_SEVERAL_RANKS = "hsdp-4-ranks"
_HUNG = "hung"
TRAINING = (
    *("--preset", "tiny", "--emulate", "world_size=8,bandwidth=100MB/s,latency=500us"),
    *("--fixed-compute", "forward=6ms,backward=12ms"),
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="make screenshots", description=__doc__)
    parser.add_argument("out", type=Path, help="where the pictures go")
    out = parser.parse_args().out
    program = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if program is None:
        sys.exit("There is no chromium on PATH. Install it: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        runs = Path(folder) / "runs"
        base, other, virtual = record_runs(runs)
        hung = Path(folder) / "hung"
        run_case(Case("data", "llama", num_ranks=4, rank=1, step=3), hung)
        shutil.copytree(next((hung / "runs").iterdir()), runs / _HUNG)
        log = Path(folder) / "server.log"
        browser = playwright.chromium.launch(executable_path=program, args=list(CHROMIUM_ARGUMENTS))
        with serve(runs, free_port(), log) as address:
            context = browser.new_context(viewport={"width": WIDTH, "height": 900})
            page = prepare(context).new_page()
            dashboard = Dashboard(page, address)
            for scheme in ("light", "dark"):
                picture_pages(dashboard, scheme, base, other, out)
                picture_what_if(dashboard, scheme, virtual, out)
            picture_live(dashboard, runs, out)
        with serve(write_nights(Path(folder) / "nights"), free_port(), log) as address:
            picture_trends(Dashboard(page, address), out)
        browser.close()


def record_runs(runs: Path) -> tuple[str, str, str]:
    """Record emulated runs next to the samples: two that differ, and one on virtual time.

    Returns:
        Their ids.
    """
    for sample in list_runs(SAMPLES):
        shutil.copytree(sample.path, runs / sample.path.name)
    write_traces(runs / "traces")
    names = ("small", "small-prefetch", "small-virtual-time")
    for name in names:
        settings = ("--forward-prefetch", "1") if name.endswith("prefetch") else ()
        before = set(runs.iterdir())
        is_virtual = name.endswith("time")
        with training(runs, *settings, "--steps", "16", is_virtual=is_virtual) as child:
            if child.wait() != 0:
                sys.exit("A run for the pictures could not be recorded.")
        [recorded] = set(runs.iterdir()) - before
        recorded.rename(runs / name)
    return names


@contextmanager
def training(
    runs: Path, *settings: str, is_virtual: bool = False
) -> "Iterator[subprocess.Popen[bytes]]":
    clock = ["tests.studies.validation.virtual_time"] if is_virtual else []
    command = [sys.executable, "-m", *clock, "instrumented_trainer", *TRAINING, *settings]
    child = subprocess.Popen(
        [*command, "--runs-dir", str(runs)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield child
    finally:
        child.terminate()
        child.wait()


def picture_pages(dashboard: Dashboard, scheme: Scheme, base: str, other: str, out: Path) -> None:
    dashboard.look(WIDTH, scheme)
    pages = {
        "runs": ("", {}),
        "overview": ("overview", {"run": base}),
        "diagnosis": ("diagnosis", {"run": _HUNG}),
        "timeline": ("timeline", {"run": base}),
        "units": ("units", {"run": base}),
        "unit": ("units", {"run": base, "unit": "layers.1"}),
        "memory": ("memory", {"run": base}),
        "ranks": ("ranks", {"run": _SEVERAL_RANKS}),
        "compare": ("compare", {"run": base, "with": other, "baseline": base}),
        "advice": ("advice", {"run": base}),
        "import": ("imports", {}),
    }
    for name, (path, parameters) in pages.items():
        dashboard.open(path, **parameters)
        save(dashboard, out / f"{name}{'' if scheme == 'light' else '-dark'}.png")


def picture_what_if(dashboard: Dashboard, scheme: Scheme, run: str, out: Path) -> None:
    dashboard.open("what_if", run=run, forward_prefetch="1")
    save(dashboard, out / f"what-if{'' if scheme == 'light' else '-dark'}.png")


def picture_trends(dashboard: Dashboard, out: Path) -> None:
    for scheme in ("light", "dark"):
        dashboard.look(WIDTH, scheme)
        dashboard.open("trends", metric="step_time_ns")
        save(dashboard, out / f"trends{'' if scheme == 'light' else '-dark'}.png")


def picture_live(dashboard: Dashboard, runs: Path, out: Path) -> None:
    before = {entry.id for entry in list_runs(runs)}
    with training(runs, "--steps", "400"):
        deadline = time.monotonic() + 60
        while not (new := [e.id for e in list_runs(runs) if e.id not in before]):
            if time.monotonic() > deadline:
                sys.exit("The live run did not begin within a minute.")
            time.sleep(0.5)
        time.sleep(20)  # wait for some steps
        for scheme in ("light", "dark"):
            dashboard.look(WIDTH, scheme)
            dashboard.open("live", run=new[0])
            save(dashboard, out / f"live{'' if scheme == 'light' else '-dark'}.png")


def save(dashboard: Dashboard, path: Path) -> None:
    """Save the page from its top, at most `TALLEST` high, in few colours."""
    path.parent.mkdir(parents=True, exist_ok=True)
    searching = dashboard.page.get_by_text("Searching for the best change")
    searching.wait_for(state="detached", timeout=60_000)  # Overview shows the best change
    dashboard.settle()
    dashboard.screenshot(path)
    with Image.open(path) as picture:
        cut = picture.crop((0, 0, picture.width, min(picture.height, TALLEST)))
        colours = Image.Quantize.MAXCOVERAGE  # keeps colours with a small area, such as in a legend
        cut.convert("RGB").quantize(256, colours).save(path, optimize=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    main()
