"""What tests read of a request on its way to a host: `marker_of(bytes)`."""

from __future__ import annotations

import re


def marker_of(request: bytes) -> bytes:
    """The request's own, which stands around a true answer. What follows its line is compressed."""
    found = re.search(rb'"marker": "([^"]+)"', request)
    assert found, "a request without a marker"
    return found[1]
