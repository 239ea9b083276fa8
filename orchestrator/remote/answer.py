"""One request, one answer: a JSON object between two markers, so that a shell's banner spoils nothing.

    reply(request, lambda request: {"told": True})      # prints MARKER{"told": true}MARKER

What the host refuses is answered as {"error", "remedy"}.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from . import trouble


class Refused(Exception):
    """message, remedy: one line each."""


def reply(request: dict[str, Any], action: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    os.umask(0o077)
    try:
        answer = action(request)
    except (OSError, ValueError, Refused) as error:
        answer = refusal(error, f"{request['action']}: ", request.get("workdir", ""))
    sys.stdout.write(request["marker"] + json.dumps(answer) + request["marker"])


def refusal(error: OSError | ValueError | Refused, doing: str = "", where: str = "") -> dict[str, str]:
    """The answer in an error's place. where: the folder that it is about, should the system not say."""
    if isinstance(error, Refused):
        return {"error": error.args[0], "remedy": error.args[1]}
    if isinstance(error, OSError):
        other = f"see `orch up` for this host's work folder, or {trouble.WORKDIR}"
        return {"error": doing + trouble.words(error, where), "remedy": trouble.remedy(error, where) or other}
    return {"error": f"{doing}{error}", "remedy": ""}
