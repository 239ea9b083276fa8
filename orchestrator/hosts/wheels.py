"""Catalogue of torch releases: the GPUs and drivers that pip's default x86_64 wheels support. Pure.

newest_for([a2000, v100])            # "2.10.0"
misfit("2.15.0", v100)               # "no code for Tesla V100-PCIE-16GB (sm_70; built for sm_75 to sm_120)"
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from orchestrator.hosts.facts import Gpu

WHEELS_FOR = "x86_64"
"""Machine type, as in uname."""
OLDEST_TORCH = "2.0.1"


@dataclass(frozen=True)
class Build:
    releases: tuple[str, ...]
    cuda: tuple[int, int]
    archs: tuple[str, ...]


# CUDA version: from the wheels' dependencies (2.7, 2.8, 2.10, 2.11, 2.14 and 2.15 checked on 2026-11-22).
# Architectures: CUDA support matrix in RELEASE.md of pytorch/pytorch (from 2.8 on); older ones from general knowledge;
# 2.15 from torch.cuda.get_arch_list().
_UNTIL_HOPPER = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")
_WITHOUT_VOLTA = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
BUILDS = (
    Build(("2.0.1",), (11, 7), ("sm_37", "sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86")),
    Build(("2.1.0", "2.1.1", "2.1.2", "2.2.0", "2.2.1", "2.2.2"), (12, 1), _UNTIL_HOPPER),
    Build(("2.3.0", "2.3.1", "2.4.0", "2.4.1"), (12, 1), _UNTIL_HOPPER),
    Build(("2.5.0", "2.5.1", "2.6.0"), (12, 4), _UNTIL_HOPPER),
    Build(("2.7.0", "2.7.1"), (12, 6), _UNTIL_HOPPER),
    Build(("2.8.0", "2.9.0", "2.9.1", "2.10.0"), (12, 8), ("sm_70", *_WITHOUT_VOLTA)),
    Build(("2.11.0", "2.12.0", "2.12.1", "2.13.0", "2.14.0", "2.14.1"), (13, 0), _WITHOUT_VOLTA),
    Build(("2.15.0",), (13, 2), _WITHOUT_VOLTA),
)
RELEASES = tuple(release for build in BUILDS for release in build.releases)
OLDEST_DRIVER = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
"""By CUDA major version (CUDA Toolkit release notes, "Minimum Required Driver Version for CUDA Minor Version
Compatibility")."""

CU126 = ((2, 11), (2, 15))
"""From the first release with default wheels for CUDA 13 to the first without others for 12.6
(pytorch/pytorch#190355, #190385)."""


def build_of(torch: str) -> Build | None:
    """None for a named build (`2.14.1+cu126`) or a later release."""
    release = numbers(torch)
    if "+" in torch or not release or release > numbers(RELEASES[-1]):
        return None
    return next((build for build in reversed(BUILDS) if numbers(build.releases[0])[:2] <= release), None)


def has_cu126(torch: str) -> bool:
    return CU126[0] <= numbers(torch) < CU126[1]


def misfit(torch: str, gpu: Gpu) -> str:
    """Why its wheels do not run on this GPU; "" if they do or if unknown."""
    build = build_of(torch)
    if build is None:
        return ""
    if gpu.compute_capability and not supports(build.archs, gpu.compute_capability):
        built = f"{build.archs[0]} to {build.archs[-1]}"
        return f"no code for {gpu.name} (sm_{gpu.compute_capability.replace('.', '')}; built for {built})"
    needed = OLDEST_DRIVER[build.cuda[0]]
    if (driver := numbers(gpu.driver)) and driver < numbers(needed):
        return (
            f"CUDA {build.cuda[0]}.{build.cuda[1]}, which needs driver {needed} or newer; {gpu.name} has {gpu.driver}"
        )
    return ""


def newest_for(gpus: Collection[Gpu], newest: str | None = None, but: Iterable[str] = ()) -> str | None:
    """newest: upper limit. but: excluded."""
    left_out = set(but)
    for torch in reversed(RELEASES):
        if torch in left_out or (newest and numbers(torch) > numbers(newest)):
            continue
        if not any(misfit(torch, gpu) for gpu in gpus):
            return torch
    return None


def supports(arch_list: tuple[str, ...], capability: str) -> bool:
    """capability: like "8.6".

    CUDA C++ Programming Guide, "Application Compatibility": binary code (sm_80) runs on the same major and an equal or
    higher minor number; PTX (compute_80) on newer GPUs; suffix `a` on that architecture only, `f` like binary code.
    """
    major, _, minor = capability.partition(".")
    gpu = (int(major), int(minor))
    for arch in arch_list:
        match = re.fullmatch(r"(sm|compute)_(\d{1,2})(\d)([af]?)", arch)
        if not match:
            continue
        built = (int(match[2]), int(match[3]))
        if built == gpu or (match[4] != "a" and built[0] == gpu[0] and built[1] <= gpu[1]):
            return True
        if match[1] == "compute" and not match[4] and built <= gpu:
            return True
    return False


def numbers(version: str) -> tuple[int, ...]:
    """(2, 0, 1) of "2.0.1+cu117"."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")[:4]) if match else ()
