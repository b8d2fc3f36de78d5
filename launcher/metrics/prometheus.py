"""The figures of a job as a page that Prometheus reads: http://ADDRESS:PORT/metrics."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from launcher.metrics.figures import RunFigures

PATH = "/metrics"
_REST = 10  # a page is kept for so many times as long as it took to write: at most a tenth of a processor is used
_CLOSE_S = 0.1  # what the end of a job waits for the server at most
_REQUEST_S = 10.0  # a client that says nothing holds a thread for no longer


class _Figures(Collector):
    def __init__(self, figures: RunFigures) -> None:
        self._figures = figures

    def describe(self) -> list[GaugeMetricFamily]:
        return []

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        for family in self._figures.collect():
            kind = CounterMetricFamily if family.figure.is_counter else GaugeMetricFamily
            metric = kind(family.figure.name, family.figure.doc, labels=family.labels)
            for labels, value, _ in family.points:
                metric.add_metric(labels, value)
            yield metric


@dataclass(frozen=True)
class _Page:
    data: bytes
    until_s: float  # monotonic


class _Pages:
    """Writes the page in the format that a client asks for, one at a time, and seldom where that takes long."""

    def __init__(self, figures: RunFigures) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Figures(figures))
        self._lock = threading.Lock()
        self._pages: dict[str, _Page] = {}  # by content type

    def get(self, accept: str) -> tuple[bytes, str]:
        """Return the page and its content type. accept: the header of the request."""
        encoder, content_type = choose_encoder(accept)
        with self._lock:
            begin_s, page = time.monotonic(), self._pages.get(content_type)
            if page is None or begin_s >= page.until_s:
                data, end_s = encoder(self._registry), time.monotonic()
                page = self._pages[content_type] = _Page(data, end_s + _REST * (end_s - begin_s))
        return page.data, content_type


class MetricsServer:
    """Serves the page on threads of this process, which do not keep it alive."""

    def __init__(self, figures: RunFigures, host: str, port: int) -> None:
        """port: 0 is a free one. Raises: OSError, or UnicodeError for a host that can have no such name."""
        pages = _Pages(figures)

        class Handler(BaseHTTPRequestHandler):
            timeout = _REQUEST_S

            def do_GET(self) -> None:
                if self.path.partition("?")[0] != PATH:
                    self.send_error(404, f"the figures are at {PATH}")
                    return
                data, content_type = pages.get(self.headers.get("Accept", ""))
                self.send_response(200)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing: the terminal is the job's."""

        self._server = _Server((host, port), Handler)
        shown = os.uname().nodename if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._server.server_address[1]}{PATH}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_CLOSE_S,), name="metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving, and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingTCPServer):
    allow_reuse_address = True  # connections of an earlier job that linger do not keep its port
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of a client that has gone."""
