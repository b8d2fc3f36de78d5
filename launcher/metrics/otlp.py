"""The figures of a job for a collector of OpenTelemetry: pushed by OTLP over HTTP every 10 s, and at the end.

Points are made of the figures directly, not by instruments of the SDK: a rank that starts again counts from its own
start, and one that has ended leaves no series, but for its last values, once.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.environment_variables import (
    OTEL_EXPORTER_OTLP_METRICS_TIMEOUT,
    OTEL_EXPORTER_OTLP_TIMEOUT,
    OTEL_SERVICE_NAME,
)
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Metric,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from launcher.metrics.figures import Family, RunFigures

AUTO = "auto"
INTERVAL_S = 10.0
_PATH = "/v1/metrics"
_TIMEOUT_S = 5.0  # of a push with its retries, unless the environment says otherwise: what the end of a job may wait
_REST = 10  # pushes are at least so many times as long apart as one takes
_TIMEOUTS = (OTEL_EXPORTER_OTLP_METRICS_TIMEOUT, OTEL_EXPORTER_OTLP_TIMEOUT)


class OtlpPusher:
    """Pushes on a thread of its own. A collector that does not answer costs figures, and is named once."""

    def __init__(self, figures: RunFigures, endpoint: str, warn: Callable[[str], object]) -> None:
        """endpoint: a URL, or `auto` for what the variables of OpenTelemetry say."""
        self._figures, self._warn = figures, warn
        endpoint = endpoint.rstrip("/")
        url = None if endpoint == AUTO else endpoint if "/" in endpoint.partition("://")[2] else endpoint + _PATH
        timeout_s = None if any(map(os.environ.get, _TIMEOUTS)) else _TIMEOUT_S
        self._errors = _LastError()
        self._exporter = OTLPMetricExporter(endpoint=url, timeout=timeout_s)
        name = os.environ.get(OTEL_SERVICE_NAME) or "launch"
        self._resource = Resource.create({SERVICE_NAME: name})
        self._scope = InstrumentationScope("launch")
        self._has_warned = False
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._push_on, name="otlp", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Push the last figures, and end. Waits for a collector no longer than a push may take."""
        self._is_over.set()
        self._thread.join()
        self._exporter.shutdown()
        self._errors.close()

    def _push_on(self) -> None:
        is_over, wait_s = False, INTERVAL_S
        while not is_over:
            is_over = self._is_over.wait(wait_s)
            begin_s = time.monotonic()
            self._push()
            wait_s = max(INTERVAL_S, _REST * (time.monotonic() - begin_s))

    def _push(self) -> None:
        families = self._figures.collect(with_ended=True)
        metrics = [_metric_of(family, time.time_ns()) for family in families]
        scopes = [ScopeMetrics(self._scope, metrics, schema_url="")]
        data = MetricsData([ResourceMetrics(self._resource, scopes, schema_url="")])
        if self._exporter.export(data) is not MetricExportResult.SUCCESS and not self._has_warned:
            self._has_warned = True
            self._warn(f"no figures reach the collector of OpenTelemetry, the job continues: {self._errors.text}")


def _metric_of(family: Family, now_ns: int) -> Metric:
    figure = family.figure
    points = [
        NumberDataPoint(
            attributes=dict(zip(family.labels, labels, strict=True)),
            start_time_unix_nano=int(start_s * 1e9) if figure.is_counter else 0,
            time_unix_nano=now_ns,
            value=value,
        )
        for labels, value, start_s in family.points
    ]
    data = Sum(points, AggregationTemporality.CUMULATIVE, is_monotonic=True) if figure.is_counter else Gauge(points)
    return Metric(figure.name, figure.doc, figure.unit, data)


class _LastError(logging.Handler):
    """Keeps what the exporter would log at each push, and keeps it off the terminal."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = "it did not take them"
        self._logger = logging.getLogger("opentelemetry.exporter")
        self._logger.addHandler(self)
        self._propagated, self._logger.propagate = self._logger.propagate, False

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()

    def close(self) -> None:
        self._logger.removeHandler(self)
        self._logger.propagate = self._propagated
        super().close()
