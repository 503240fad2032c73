"""Run all checks that need a GPU: `make gpu`, or `python -m tests.gpu --out DIR`.

Each step runs in a separate process with a time limit, so that a step that fails or hangs does not
affect the others. At the end one table shows the measured numbers with their aims. DIR has the
table as Markdown and JSON, the log of the steps, and small recorded runs. It is written after each
step. The exit code is 1 if a step failed, was not started for lack of time, or missed an aim. It is
0 if all rows that this machine can measure hold.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.gpu.outcome import Row, Verdict, failed, not_started, unavailable
from tests.gpu.results import LOG, MAX_FILE_BYTES, Results, merge_folders, shorten
from tests.gpu.sample import ROOT, command_of, pack, sample_name
from tests.gpu.setting import NO_DEVICE, Setting, nccl_version
from tests.gpu.step import ROWS
from tests.studies.benchmarks.machine import describe_machine

STEPS = {
    "smoke": 75.0,
    "timing": 75.0,
    "paths": 90.0,
    "memory": 75.0,
    "core_tests": 120.0,
    "costs": 60.0,
    "forecast": 90.0,
    "clock": 60.0,
    "two_ranks": 60.0,
    "emulated": 120.0,
    "sample": 60.0,
    "trainer_tests": 150.0,
    "overhead": 180.0,
}
"""The time limit of each step in seconds, in order of importance. The longest step is the last, and
takes the remaining time."""
_TOTAL_S = 480.0
_QUICK_FACTOR = 5
"""A quick trial may run on a busy CPU, so its steps have more time."""
_LEAST_S = 10.0
"""A step is not started if less time is left."""
_QUOTED_LINES = 3


@dataclass(slots=True)
class Script:
    """One call of the script."""

    options: argparse.Namespace
    scratch: Path
    results: Results
    started: float = field(default_factory=time.monotonic)

    def run(self, name: str) -> None:
        """Run one step; its results, or the reason why there are none, are in `results`."""
        left = self.options.limit_s - self._elapsed_s
        if left < _LEAST_S:
            total = f"{self.options.limit_s:.0f} s"
            self._end(name, [not_started(name, f"Not started: all {total} of the call were used.")])
            return
        slower = _QUICK_FACTOR if self.options.quick else 1
        setting = self.setting_of(name, min(left, STEPS[name] * slower))
        setting.scratch.mkdir()
        self._say(f"{name} ...")
        problem = self._run_child(name, setting)
        found = _read_rows(setting.scratch / ROWS)
        self._end(name, [*found, *([failed(name, problem)] if problem else [])])
        self._keep_files(name, setting)
        shutil.rmtree(setting.scratch, ignore_errors=True)

    def setting_of(self, name: str, limit_s: float) -> Setting:
        """The setting of a step."""
        return Setting(self.options.device, self.options.quick, self.scratch / name, limit_s)

    def skip(self, reason: str) -> None:
        """Note that nothing can run here."""
        for name in self.options.only:
            self._end(name, [unavailable(name, reason)])

    def finish(self) -> int:
        """Print the table; returns the exit code."""
        print(f"\n{self.results.table}", flush=True)
        return self.results.exit_code

    def _keep_files(self, name: str, setting: Setting) -> None:
        """Pack the sample, and the files that a step keeps."""
        out: Path | None = self.options.out
        if out is None:
            return
        sample = sample_name(self.options.device)
        if (setting.scratch / sample / "expected.json").exists():
            machine = self.results.machine
            command = command_of(setting)
            target = out / f"{sample}.tar.gz"
            pack(
                setting.scratch / sample,
                target,
                command,
                machine.gpu or machine.cpu,
                self.results.table,
            )
        if setting.kept.exists():
            target = out / f"{name}.tar.gz"
            with tarfile.open(target, "w:gz") as archive:
                archive.add(setting.kept, arcname=name)
            if target.stat().st_size > MAX_FILE_BYTES:
                target.unlink()
                self._say(f"{name}: its files are too large to keep")

    def _write_figures(self) -> None:
        """Write the current results, which stay if the call is interrupted."""
        if self.options.out is not None:
            self.results.write(self.options.out)
            shorten(self.options.out / LOG)

    def _run_child(self, name: str, setting: Setting) -> str:
        """The reason why the step failed; empty if it succeeded."""
        log = (self.options.out or self.scratch) / LOG
        with log.open("ab") as output:
            output.write(f"=== {name}\n".encode())
            output.flush()
            child = subprocess.Popen(
                [sys.executable, "-m", "tests.gpu.step", name, setting.to_json()],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                code = child.wait(setting.limit_s)
            except subprocess.TimeoutExpired:
                return f"Stopped after {setting.limit_s:.1f} s, its limit. {_end_of(log)}"
            finally:
                _kill_with_descendants(child)
        return f"Ended with {code}. {_end_of(log)}" if code else ""

    def _end(self, name: str, rows: list[Row]) -> None:
        self.results.put(name, rows)
        self._write_figures()
        self._say(f"{name}: {_count(rows)}")

    def _say(self, text: str) -> None:
        print(f"[{self._elapsed_s:4.0f} s] {text}", flush=True)

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self.started


def main(arguments: list[str] | None = None) -> int:
    """Run the chosen steps, or merge earlier calls; returns the exit code."""
    options = _parse(arguments)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    if options.merge:
        merged = merge_folders(options.merge, options.out)
        print(merged.table)
        return merged.exit_code
    with tempfile.TemporaryDirectory(prefix="fsdp-inspect-gpu-") as folder:
        gpu = _describe_gpu() if options.device == "cuda" else ""
        results = Results(describe_machine(gpu))
        earlier = None if options.out is None else Results.read(options.out)
        if earlier is not None:
            earlier.add(results)
            results = earlier
        script = Script(options, Path(folder), results)
        if options.device == "cuda" and not gpu:
            script.skip(f"{NO_DEVICE}. `--device cpu --quick` tries the script itself.")
        else:
            for name in options.only:
                script.run(name)
        return script.finish()


def _describe_gpu() -> str:
    """The GPU and its driver; empty if there is none."""
    import torch

    if not torch.cuda.is_available():
        return ""
    nccl = ".".join(str(part) for part in nccl_version())
    count = torch.cuda.device_count()
    return f"{count} x {torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}, NCCL {nccl}"


def _read_rows(path: Path) -> list[Row]:
    return [Row.from_json(line) for line in path.read_text().splitlines()] if path.exists() else []


def _count(rows: list[Row]) -> str:
    verdicts = [row.verdict for row in rows]
    missed = verdicts.count(Verdict.MISSED)
    absent = verdicts.count(Verdict.NOT_AVAILABLE)
    waiting = verdicts.count(Verdict.NOT_STARTED)
    late = f", {waiting} not started" if waiting else ""
    return f"{len(rows)} rows, {missed} missed, {absent} not available{late}"


def _end_of(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"The end of its log: {' / '.join(lines[-_QUOTED_LINES:]) or 'nothing'}"


def _kill_with_descendants(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is not None:
        return
    # torchrun starts its ranks in separate sessions, which a signal to the group does not reach.
    process = psutil.Process(child.pid)
    for member in [*process.children(recursive=True), process]:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    child.wait(10)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="also write table, log and sample; earlier results in DIR are merged",
    )
    parser.add_argument(
        "--only", nargs="+", choices=STEPS, default=list(STEPS), help="default: all steps"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--quick", action="store_true", help="little work: tries the script, judges no noisy number"
    )
    parser.add_argument(
        "--limit-s",
        type=float,
        default=_TOTAL_S,
        metavar="S",
        help=f"seconds for all steps together (default {_TOTAL_S:.0f})",
    )
    parser.add_argument(
        "--merge",
        nargs="+",
        type=Path,
        metavar="DIR",
        help="merge the results of several calls into --out, the earliest call first",
    )
    options = parser.parse_args(arguments)
    if options.merge and options.out is None:
        parser.error("--merge requires --out, the folder for the merged results")
    return options


if __name__ == "__main__":
    sys.exit(main())
