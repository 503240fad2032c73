"""Build a program that runs torch's own caching allocator without a GPU.

    python tests/emulation/allocator/real_allocator/build.py OUT --lib DIR --cuda DIR

`--lib` holds `libc10.so` and `libc10_cuda.so` of a CUDA build of torch (`torch/lib`), `--cuda` the
headers of the same CUDA version (`include/cuda_runtime_api.h`). The program links the two libraries
to a CUDA runtime that only counts memory (`fake_cuda.cpp`), so it needs neither driver nor GPU.
"""

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
RUNTIME = "libcudart.so.13"


def build(out: Path, lib: Path, cuda: Path) -> Path:
    """Build the program `out/driver`; returns its path."""
    out.mkdir(parents=True, exist_ok=True)
    _build_runtime(out, lib, cuda)
    torch_include = _torch_include()
    program = out / "driver"
    _run(
        ["g++", "-std=c++20", "-O1", "-w", "-DC10_CUDA_NO_CMAKE_CONFIGURE_FILE"],
        ["-DPYTORCH_C10_DRIVER_API_SUPPORTED", f"-I{torch_include}", f"-I{cuda}/include"],
        [f"{HERE}/driver.cpp", "-o", program, f"{out}/{RUNTIME}"],
        [f"{lib}/libc10_cuda.so", f"{lib}/libc10.so"],
        [f"-Wl,-rpath,{out.resolve()}", f"-Wl,-rpath,{lib.resolve()}"],
        ["-Wl,--disable-new-dtags", "-Wl,--no-as-needed"],
    )
    return program


def _build_runtime(out: Path, lib: Path, cuda: Path) -> None:
    """Build the runtime: `fake_cuda.cpp`, and functions without effect for all other symbols."""
    source = (HERE / "fake_cuda.cpp").read_text()
    listed = subprocess.run(
        ["nm", "-D", "--undefined-only", lib / "libc10_cuda.so"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    wanted = {word.partition("@")[0] for word in listed if f"@{RUNTIME}" in word}
    missing = sorted(name for name in wanted if f" {name}(" not in source)
    stubs, versions = out / "stubs.c", out / "versions.txt"
    stubs.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in missing))
    versions.write_text(f"{RUNTIME} {{ global: *; }};\n")
    _run(["gcc", "-w", "-fPIC", "-c", stubs, "-o", out / "stubs.o"])
    _run(
        ["g++", "-std=c++20", "-w", "-shared", "-fPIC", f"-I{cuda}/include"],
        [HERE / "fake_cuda.cpp", out / "stubs.o", "-o", out / RUNTIME],
        [f"-Wl,-soname,{RUNTIME}", f"-Wl,--version-script={versions}"],
    )


def _torch_include() -> Path:
    import torch

    return Path(torch.__file__).parent / "include"


def _run(*parts: list[object]) -> None:
    subprocess.run([str(word) for part in parts for word in part], check=True)


def main() -> None:
    """Build with the folders of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--lib", type=Path, required=True)
    parser.add_argument("--cuda", type=Path, required=True)
    options = parser.parse_args()
    print(build(options.out, options.lib, options.cuda), file=sys.stdout)


if __name__ == "__main__":
    main()
