"""`ui`: serves the local web page."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import click

from orchestrator.cli.common import cluster_option, open_controller, out_option
from orchestrator.errors import OrchError

if TYPE_CHECKING:
    import socket


@click.command()
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Listen on this port.  [default: any free port]")
@out_option
@cluster_option
def ui(port: int, out: Path, cluster: str | None) -> None:
    """Show clusters, hosts and jobs in a browser, and act on them: a local page only for you.

    It listens on 127.0.0.1 only, and its address holds a secret: all who have it can do what you can. From elsewhere,
    reach it by `ssh -L`. Ctrl-C ends it; jobs keep running. It also prints a separate URL for Prometheus;
    --port keeps that URL fixed.
    Needs the extra `ui`: pip install 'orch[ui]'.

    \b
    orch ui
    orch ui --port 8123
    """
    try:
        from orchestrator.ui.access import Access, kept_token, new_token
        from orchestrator.ui.app import Watched, application
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "orchestrator":
            raise
        raise OrchError(f"orch ui needs the package {error.name}", "pip install 'orch[ui]'") from error
    import asyncio

    from orchestrator.paths import Home
    from orchestrator.views import console

    with open_controller() as controller:
        first = controller.store.cluster(cluster).name if cluster else ""
    listener = _listener(port)
    home = Home.default()
    with contextlib.suppress(KeyboardInterrupt), contextlib.closing(Watched(home)) as watched, listener:
        app = application(home, out, watched)
        access = Access(app, new_token(), kept_token(home), listener.getsockname()[1])
        console.put(access.address + (f"?cluster={quote(first)}" if first else ""))
        console.say(f"for a Prometheus: {access.metrics_address}")
        console.say("Ctrl-C ends it; jobs keep running")
        asyncio.run(access.serve(listener))


def _listener(port: int) -> socket.socket:
    """Raises OrchError if the port is in use."""
    import socket

    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
        listener.listen(128)  # the address may be used at once
    except OSError as error:
        listener.close()
        raise OrchError(f"port {port}: {error.strerror}", "orch ui, without --port, takes any free port") from error
    return listener
