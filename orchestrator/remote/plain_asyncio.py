"""asyncio without `ssl`, which hosts do not use: it takes a fifth of the import time, and memory.

    from .plain_asyncio import asyncio

asyncio supports Python builds without `ssl`.
"""

from __future__ import annotations

import sys

if "asyncio" not in sys.modules and "ssl" not in sys.modules:
    sys.modules["ssl"] = None  # type: ignore[assignment]  # what Python takes for a module that there is not
    import asyncio as asyncio

    del sys.modules["ssl"]
else:
    import asyncio as asyncio
