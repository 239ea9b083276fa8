"""asyncio as a host needs it: nothing here speaks TLS, whose import takes a fifth of asyncio's, and its library memory.

    from .plain_asyncio import asyncio

asyncio does without `ssl` where there is none, as in a Python that was built without it.
"""

from __future__ import annotations

import sys

if "asyncio" not in sys.modules and "ssl" not in sys.modules:
    sys.modules["ssl"] = None  # type: ignore[assignment]  # what Python takes for a module that there is not
    import asyncio as asyncio

    del sys.modules["ssl"]
else:
    import asyncio as asyncio
