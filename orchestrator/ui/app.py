"""The routes of the page and their responses: `application(home, out, watched)`.

`access` has checked the secret. Each response reads the store again, to include changes by commands and other users.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from urllib.parse import parse_qsl, urlencode

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from orchestrator.controller import Controller, opened
from orchestrator.errors import HostsError, NoJobError, OrchError, StateError, UsageError
from orchestrator.jobs.collect import newest_copy
from orchestrator.jobs.gauging import GaugedJob
from orchestrator.jobs.job_store import ENDED, JobRecord
from orchestrator.jobs.live_stats import JobNow
from orchestrator.paths import Home, RunFolder
from orchestrator.results.compare import compare
from orchestrator.results.summary import Summary
from orchestrator.ui import pages
from orchestrator.ui import pages as metrics
from orchestrator.ui.pages import ACTS, NEEDED, JobFigures
from orchestrator.units import counted
from orchestrator.views.charts import MOST_LINES
from orchestrator.views.documents import cluster_json, top_json
from orchestrator.views.run_comparison import render_comparison

EVERY_S = 1.0
PLAIN = "text/plain; charset=utf-8"
MOST_FORM_BYTES = 1 << 16
OWN_PAGE = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:"}
"""For reports and comparisons, which contain their style and pictures."""


def application(home: Home, out: Path, watched: Watched) -> Starlette:
    """out: the folder of collected runs."""
    site = LocalSite(home, out, watched)
    return Starlette(
        routes=[
            Route("/", site.cluster),
            Route("/style.css", lambda _: Response(pages.style(), media_type="text/css")),
            Route("/live.js", lambda _: Response(pages.script(), media_type="text/javascript")),
            Route("/status", site.status),
            Route("/events", site.events),
            Route("/jobs/{job}", site.job),
            Route("/jobs/{job}/figures", site.figures),
            Route("/jobs/{job}/log", site.log),
            Route("/jobs/{job}/report", site.report),
            Route("/compare", site.compare),
            Route("/metrics", site.metrics),
            Route("/do/{act}", site.act, methods=["POST"]),
        ],
        exception_handlers={OrchError: _in_words, 404: _no_such_page},
    )


def _in_words(request: Request, error: Exception) -> Response:
    assert isinstance(error, OrchError)  # noqa: S101 - for the type checker
    kept = f"?{urlencode([*request.query_params.multi_items(), ('kept', '1')])}" if isinstance(error, Stale) else ""
    return HTMLResponse(pages.error_page(error, _root(request), kept), 404 if isinstance(error, NoJobError) else 400)


def _no_such_page(request: Request, _: Exception) -> Response:
    return HTMLResponse(pages.error_page(OrchError("there is no such page"), _root(request)), 404)


def _root(request: Request) -> str:
    """The relative address of the first page."""
    return "../" * (request.scope["path"].count("/") - 1) or "./"


def _first_of(error: OrchError) -> OrchError:
    """For several hosts' errors the first, with its remedy."""
    return error.errors[0] if isinstance(error, HostsError) else error


@lru_cache(maxsize=2 * pages.MOST_JOBS)
def _loaded(run: Path, changed_ns: int) -> Summary:
    """changed_ns: a changed file is read again."""
    return Summary.load(RunFolder(run))


class Stale(OrchError):
    """Collecting failed, but an older copy exists."""


class LocalSite:
    def __init__(self, home: Home, out: Path, watched: Watched) -> None:
        self._home, self._out, self._watched = home, out, watched

    # ---- pages ----------------------------------------------------------------------------------------------------

    def cluster(self, request: Request) -> Response:
        with opened(self._home) as controller:
            said = request.query_params.get("said", "")
            return HTMLResponse(self._page(controller, request.query_params.get("cluster"), _root(request), said))

    def _page(
        self, controller: Controller, name: str | None, root: str, said: str = "", error: OrchError | None = None
    ) -> str:
        cluster = controller.store.cluster(name)
        listed = controller.jobs.all(cluster.name)
        queue = controller.queue.waiting(listed.records).get(cluster.name, ())
        names = controller.store.cluster_names()
        shown = [record.id for record in listed.records[: pages.MOST_JOBS]]
        collected = {job: summary for job in shown if (summary := self._summary(controller, job))}
        return pages.cluster_page(cluster, names, listed, collected, queue, root, said, error)

    def _summary(self, controller: Controller, job: str) -> Summary | None:
        """From the newest collected copy."""
        copy = newest_copy(controller.store, job)
        with suppress(OrchError, OSError):  # a damaged copy is collected anew by its report
            return _loaded(copy.root, copy.summary.stat().st_mtime_ns) if copy else None
        return None

    def status(self, request: Request) -> Response:
        """Each host's status by name, as in `orch status`."""
        with opened(self._home) as controller:
            cluster = controller.store.cluster(request.query_params.get("cluster"))
            rows = cluster_json(cluster, controller.connections.silent(cluster.nodes))["nodes"]
        return JSONResponse({row["name"]: row["status"] for row in rows})

    def job(self, request: Request) -> Response:
        with opened(self._home) as controller:
            job = controller.jobs.find(request.path_params["job"])
            record, plan = job.refresh(), job.plan
            # A running job's page asks for its figures: the first ones may take seconds.
            figures = self._figures(controller, record) if record.state in ENDED else None
        return HTMLResponse(pages.job_page(record, plan, figures, _root(request)))

    def figures(self, request: Request) -> Response:
        """The part of the job's page that changes while it runs."""
        with opened(self._home) as controller:
            job = controller.jobs.find(request.path_params["job"])
            figures = self._figures(controller, job.record)
        return HTMLResponse(pages.figures_part(figures) if figures else "")

    def _figures(self, controller: Controller, record: JobRecord) -> JobFigures | None:
        if record.state not in ENDED:
            return pages.figures_live(self._watched.now(record.id))
        summary = self._summary(controller, record.id)
        return pages.figures_collected(summary) if summary else None

    def report(self, request: Request) -> Response:
        with opened(self._home) as controller:
            job = controller.jobs.find(request.path_params["job"])
            run = self._collected(controller, job.id, request)
        return HTMLResponse(run.report.read_text(), headers=OWN_PAGE)

    def compare(self, request: Request) -> Response:
        with opened(self._home) as controller:
            ids = [controller.store.find_job(job) for job in request.query_params.getlist("job")]
            if not 2 <= len(ids) <= MOST_LINES:
                raise UsageError(f"{counted(len(ids), 'job')} chosen", f"choose 2 to {MOST_LINES}")
            runs = [self._collected(controller, job, request) for job in ids]
        return HTMLResponse(render_comparison(compare(runs)), headers=OWN_PAGE)

    def _collected(self, controller: Controller, job: str, request: Request) -> RunFolder:
        """Collects the run, or returns an older copy if the request asks for it. Raises Stale if only a copy exists."""
        if "kept" in request.query_params and (copy := self._copy(controller, job)):
            return copy
        try:
            found = controller.collect(controller.jobs.find(job), self._out)
            if found.errors:
                raise HostsError([*found.errors.values()])
        except OrchError as error:
            first = _first_of(error)
            if self._copy(controller, job) is None:
                raise first from error
            raise Stale(f"{job}: {first.message}", first.remedy) from error
        return found.run

    def _copy(self, controller: Controller, job: str) -> RunFolder | None:
        copy = newest_copy(controller.store, job)
        return copy if copy and copy.report.is_file() else None

    # ---- actions --------------------------------------------------------------------------------------------------

    async def act(self, request: Request) -> Response:
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > MOST_FORM_BYTES:
                return Response("too large\n", 413)
        form = dict(parse_qsl(body.decode(errors="replace"), keep_blank_values=True))
        return await run_in_threadpool(self._act, request, form)

    def _act(self, request: Request, form: dict[str, str]) -> Response:
        name, root = request.path_params["act"], _root(request)
        if name not in ACTS or (name in NEEDED and NEEDED[name] not in form):
            return Response("no such form\n", 404)
        with opened(self._home) as controller:
            cluster = controller.store.cluster(form.get("cluster") or None)
            try:
                said = ACTS[name](controller, cluster, form)
            except OrchError as error:
                return HTMLResponse(self._page(controller, cluster.name, root, error=_first_of(error)), 400)
        return RedirectResponse(f"{root}?" + urlencode({"cluster": cluster.name, "said": said}), 303)

    # ---- live -----------------------------------------------------------------------------------------------------

    def _running(self, cluster: str | None) -> list[JobNow]:
        with opened(self._home) as controller:
            known = controller.store.jobs()
        found = []
        for job in known:
            if job.state not in ENDED and cluster in (None, job.cluster):
                with suppress(StateError):  # its plan is damaged, as the page reports
                    found.append(self._watched.now(job.id))
        return found

    async def events(self, request: Request) -> Response:
        """Live figures of a cluster's running jobs, as server-sent events."""
        cluster = request.query_params.get("cluster")

        async def events() -> AsyncIterator[str]:
            while True:
                found = await run_in_threadpool(self._running, cluster)
                yield f"data: {json.dumps([top_json(job) for job in found])}\n\n"
                await asyncio.sleep(EVERY_S)

        return StreamingResponse(events(), media_type="text/event-stream")

    async def log(self, request: Request) -> Response:
        """The last lines of each rank's logs and all that follow, until the job ends or the browser leaves."""
        with opened(self._home) as controller:
            job = controller.jobs.find(request.path_params["job"]).id
        return StreamingResponse(log_lines(self._home, job, request.is_disconnected), media_type=PLAIN)

    def metrics(self, request: Request) -> Response:
        return Response(metrics.metrics_of(self._running(None)), media_type=metrics.CONTENT_TYPE)


# A job's log for a browser, followed in its own thread, which ends soon after the browser leaves. A job may print
# nothing for hours, so neither the pool that serves requests nor the end of the page may wait for its next line.

LAST_LINES = 50
"""Earlier lines of each of a rank's logs."""
WAITING = 64
"""Pieces buffered for the browser; beyond that the hosts wait, never the job."""
LOOK_S = 1.0


async def log_lines(home: Home, job: str, has_left: Callable[[], Awaitable[bool]]) -> AsyncIterator[str]:
    pieces, left = asyncio.Queue[str | None](WAITING), threading.Event()
    loop = asyncio.get_running_loop()

    def say(piece: str | None) -> None:
        with contextlib.suppress(RuntimeError):  # the page has ended, and its loop
            put = asyncio.run_coroutine_threadsafe(pieces.put(piece), loop)
            while not left.is_set():
                with contextlib.suppress(concurrent.futures.TimeoutError):
                    put.result(LOOK_S)
                    break

    def read() -> None:
        try:
            for piece in _followed(home, job, lambda: not left.is_set()):
                say(piece)
        except OrchError as error:
            say(f"{error.message}\n")
        finally:
            say(None)

    threading.Thread(target=read, daemon=True, name=f"log-{job}").start()
    try:
        while not await has_left():
            with contextlib.suppress(asyncio.TimeoutError):
                piece = await asyncio.wait_for(pieces.get(), LOOK_S)
                if piece is None:
                    return
                yield piece
    finally:
        left.set()


def _followed(home: Home, job: str, wanted: Callable[[], bool]) -> Iterator[str]:
    with opened(home) as controller:
        found = controller.jobs.find(job)
        goes_on, last = found.refresh().state not in ENDED, dict.fromkeys(range(found.plan.world_size), LAST_LINES)
        for event in found.follow(until_end=goes_on, last_lines=last, wanted=wanted):
            if isinstance(event, tuple):
                yield "".join(f"[{line.node} {line.rank}] {line.text}\n" for line in event)


# Live figures for the page: a running job's hosts are connected from its first view until it is no longer viewed.

UNSEEN_S = 15.0
"""Without a view for this long, the connections to a job's hosts are closed."""
FIRST_S = 3.0
"""Longest wait of the first view for the hosts' first figures."""
AGAIN_S = 10.0
"""Least time between two reconnects to a running job."""


@dataclass
class Viewed:
    """before: shown after a reconnect until the first figures arrive."""

    gauged: GaugedJob
    begun_s: float
    before: GaugedJob | None = None

    @property
    def is_due_again(self) -> bool:
        has_ended = self.gauged.record.state in ENDED
        return self.gauged.is_over and not has_ended and time.monotonic() - self.begun_s > AGAIN_S


class Watched:
    def __init__(self, home: Home) -> None:
        self._home = home
        self._lock = threading.Lock()
        self._jobs: dict[str, Viewed] = {}
        self._seen_s: dict[str, float] = {}
        self._closed = threading.Event()
        threading.Thread(target=self._let_go, daemon=True, name="watched").start()

    def now(self, job: str) -> JobNow:
        """Raises UsageError for an unknown job."""
        with self._lock:
            self._seen_s[job] = time.monotonic()
            known = self._jobs.get(job)
            if known is None or known.is_due_again:
                known = self._jobs[job] = Viewed(self._begun(job), time.monotonic(), known.gauged if known else None)
        if known.before and not known.gauged.heard.is_set():
            return known.before.now()
        known.gauged.heard.wait(FIRST_S)
        return known.gauged.now()

    def _begun(self, job: str) -> GaugedJob:
        with opened(self._home) as controller:
            gauged = GaugedJob(controller.jobs.find(job))
        gauged.start()  # over its own connections
        return gauged

    def _let_go(self) -> None:
        while not self._closed.wait(UNSEEN_S / 3):
            with self._lock:
                self._drop_unseen()

    def _drop_unseen(self) -> None:
        for job in [job for job, at_s in self._seen_s.items() if time.monotonic() - at_s > UNSEEN_S]:
            del self._seen_s[job]
            self._end(job)

    def _end(self, job: str) -> None:
        if found := self._jobs.pop(job, None):
            found.gauged.leave()

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            for job in [*self._jobs]:
                self._end(job)
