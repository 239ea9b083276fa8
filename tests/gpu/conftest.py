"""The tests of this folder are marked gpu, and without a GPU they are skipped before anything imports torch."""

import pytest

from .here import is_stand_in, why_no_gpu


class WithoutGpu(pytest.Module):
    """A file of tests that nobody can run here."""

    def collect(self):
        pytest.skip(f"{why_no_gpu()}; see docs/gpu.md", allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    return WithoutGpu.from_parent(parent, path=module_path) if why_no_gpu() else None


def pytest_itemcollected(item):
    item.add_marker(pytest.mark.gpu)
    # What torch or a driver warns of differs from machine to machine, and says nothing of our code.
    item.add_marker(pytest.mark.filterwarnings("default"))
    if is_stand_in() and item.get_closest_marker("computes"):
        item.add_marker(pytest.mark.skip(reason="the stand-in for CUDA computes no numbers"))


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Starts the trainer on this machine's GPUs."""
    import time

    import torch

    from .runs import Runs

    return Runs(tmp_path_factory.mktemp("runs"), torch.cuda.device_count(), deadline_s=time.monotonic() + 3600)
