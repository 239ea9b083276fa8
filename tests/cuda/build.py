"""Builds the stand-in for CUDA on demand: `libraries()` gives what a process has to preload.

Kept below `build/cuda-standin/`, by a hash of the sources and torch's version, so that it is built once. Every function
of CUDA that this torch asks for and that no source defines is generated: it does nothing and reports success.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = Path(__file__).with_name("standin")
BUILT = ROOT / "build" / "cuda-standin"
USERS = ("libc10_cuda", "libtorch_cuda", "libtorch_python", "libtorch_cuda_linalg", "libtorch_cpu", "libcaffe2_nvrtc")
"""torch's libraries that call CUDA."""
HEADERS = {
    "cuda_runtime_api.h": "nvidia/cu13/include",
    "crt/host_defines.h": "triton/backends/nvidia/include",
    "cudnn.h": "nvidia/cudnn/include",
    "nccl.h": "nvidia/nccl/include",
}
"""Each header that the sources need, and where torch's own wheels bring it. The order is that of the search."""
_CALLS = re.compile(r"(cuda|__cuda|cublas|cudnn|nccl|cusolver|cusparse|curand|cufft)\w+$")
_PRODUCT = re.compile(r"cublas[SDCZ]?(gem|ger|sy|he|tr|axpy|scal)|cublasGemm", re.I)
_DRIVER = re.compile(r"cu[A-Z]\w+$")


class CannotBuild(Exception):
    """str: one line, why the stand-in cannot be built here."""


def libraries() -> list[Path]:
    """The libraries to preload, in this order. Raises CannotBuild."""
    packages, torch_libraries = _torch()
    if not shutil.which("g++") or not shutil.which("nm"):
        raise CannotBuild("g++ and nm are not installed (Debian: apt-get install g++)")
    folder = BUILT / _fingerprint()
    if not folder.exists():
        _build_into(folder, _include_folders(packages), torch_libraries)
    return [folder / "libcuda_standin.so", folder / "libcuda.so.1"]


def _torch() -> tuple[Path, list[Path]]:
    """The folder that torch is installed in, and its libraries that call CUDA."""
    found = importlib.util.find_spec("torch")
    if not found or not found.origin:
        raise CannotBuild("torch is not installed")
    package = Path(found.origin).parent
    libraries = [package / "lib" / f"{name}.so" for name in USERS]
    missing = [library.name for library in libraries if not library.exists()]
    if missing:
        raise CannotBuild(f"this torch is built without CUDA ({missing[0]} is missing)")
    return package.parent, libraries


def _include_folders(packages: Path) -> list[Path]:
    for header, folder in HEADERS.items():
        if not (packages / folder / header).exists():
            raise CannotBuild(
                f"{packages / folder / header} is missing: the stand-in is written for torch with CUDA 13"
            )
    return [packages / folder for folder in HEADERS.values()]


def _fingerprint() -> str:
    digest = hashlib.sha256(importlib.metadata.version("torch").encode())
    for path in [Path(__file__), *sorted(SOURCES.iterdir())]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _build_into(folder: Path, include: list[Path], torch_libraries: list[Path]) -> None:
    """Whole or not at all, also when two processes build at once."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    workshop = Path(tempfile.mkdtemp(prefix="being-built-", dir=folder.parent))
    try:
        _compile(workshop, include, _wanted(torch_libraries))
        os.rename(workshop, folder)
    except OSError:
        if not folder.exists():  # else somebody else was first
            raise
    finally:
        shutil.rmtree(workshop, ignore_errors=True)


def _wanted(libraries: list[Path]) -> list[str]:
    """The names of all functions that these ask for."""
    lines = _run("nm", "-D", "--undefined-only", *map(str, libraries)).splitlines()
    return sorted({line.split()[-1].partition("@")[0] for line in lines if line.split()})


def _compile(folder: Path, include: list[Path], wanted: list[str]) -> None:
    flags = ["-O1", "-fPIC", "-Wall", "-Wno-unused", *(flag for path in include for flag in ("-isystem", str(path)))]
    objects = [folder / f"{source.stem}.o" for source in sorted(SOURCES.glob("*.cpp"))]
    for made in objects:
        _run("g++", "-std=c++17", *flags, "-c", str(SOURCES / f"{made.stem}.cpp"), "-o", str(made))
    defined = _defined(objects)
    rest, driver = folder / "rest.c", folder / "driver.c"
    rest.write_text(_REST + "".join(_stub(name) for name in wanted if _CALLS.match(name) and name not in defined))
    _run("g++", "-shared", "-fPIC", "-w", "-o", str(folder / "libcuda_standin.so"), *map(str, objects), "-x", "c",
         str(rest), "-lpthread")  # fmt: skip
    text = (SOURCES / "driver.c").read_text()
    stubs = [name for name in wanted if _DRIVER.match(name) and not name.startswith("cuFile") and name not in text]
    driver.write_text(text + "".join(f"int {name}(void) {{ return 0; }}\n" for name in stubs))
    _run("g++", "-x", "c", "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", "-o", str(folder / "libcuda.so.1"),
         str(driver))  # fmt: skip
    for path in objects:
        path.unlink()


def _defined(objects: list[Path]) -> set[str]:
    rows = [line.split() for line in _run("nm", "--defined-only", *map(str, objects)).splitlines()]
    return {row[2] for row in rows if len(row) == 3 and row[1] == "T"}


_REST = "int standin_product(void *handle);\nvoid standin_unknown(const char *name);\n"


def _stub(name: str) -> str:
    """A function that no source defines. What it would have written to its arguments stays as it was."""
    if _PRODUCT.match(name):
        return f"int {name}(void *handle) {{ return standin_product(handle); }}\n"
    return f'long {name}(void) {{ standin_unknown("{name}"); return 0; }}\n'


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise CannotBuild(f"{' '.join(command[:2])} failed: {done.stderr.strip()[-2000:]}")
    return done.stdout
