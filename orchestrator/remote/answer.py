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


class Refused(Exception):
    """message, remedy: one line each."""


def reply(request: dict[str, Any], action: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    os.umask(0o077)
    try:
        answer = action(request)
    except Refused as refusal:
        answer = {"error": refusal.args[0], "remedy": refusal.args[1]}
    except ValueError as error:
        answer = {"error": f"{request['action']}: {error}", "remedy": ""}
    except OSError as error:
        answer = {
            "error": f"{request['action']}: {error.strerror or error} ({error.filename or request['workdir']})",
            "remedy": "see `orch up` for this host's work folder and free space; `workdir:` in the inventory moves it",
        }
    sys.stdout.write(request["marker"] + json.dumps(answer) + request["marker"])
