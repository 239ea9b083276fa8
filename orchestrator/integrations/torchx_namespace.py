"""Registers orch with versions of TorchX that look for plug-ins in the namespace `torchx_plugins`.

`wheel.py` puts it there. These versions also read entry points, and warn of a scheduler that has both: then the entry
point in `pyproject.toml` counts.
"""

from __future__ import annotations

import os

from torchx.plugins import _registry, register

ENTRY_POINTS = getattr(getattr(_registry, "PluginSource", None), "ENTRYPOINT", 0)
ALL_SOURCES = "3"

if not int(os.environ.get("TORCHX_PLUGINS_SOURCE", ALL_SOURCES)) & ENTRY_POINTS:

    @register.scheduler(name="orch")
    def orch(session_name: str, **params: object) -> object:
        from orchestrator.integrations.torchx_scheduler import create_scheduler

        return create_scheduler(session_name, **params)
