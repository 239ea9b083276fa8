"""Environment variables and shell as they may be shown: without what may be a secret. Pure."""

from __future__ import annotations

import re

MASK = "***"

# Settings of known libraries. The value of any other variable of `env` may be a secret, whatever it is called.
_HARMLESS = re.compile(
    r"(OMP|MKL|KMP|OPENBLAS|NCCL|GLOO|TP|UCX|CUDA|CUDNN|CUBLAS|TORCH|TORCHINDUCTOR|PYTORCH|TRITON|XLA|ORCH)_[A-Z0-9_]+"
    r"|PYTHON[A-Z]+|(LD_LIBRARY_)?PATH|TMPDIR|LANG|TZ|LC_[A-Z]+"
)

_SECRET = re.compile(r"token|secret|passw|credential|api_?key|private_?key|access_?key", re.IGNORECASE)


def masked_env(env: dict[str, str]) -> dict[str, str]:
    """Every name, and the values of those that are known to be no secrets."""
    harmless = {name for name in env if _HARMLESS.fullmatch(name) and not _SECRET.search(name)}
    return {name: value if name in harmless else MASK for name, value in env.items()}


def mask(shell: str | None) -> str | None:
    """Shows only that there is such a piece of shell: any of its words may be a secret."""
    return shell and MASK
