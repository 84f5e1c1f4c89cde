"""The metrics that `GET /metrics` reports to Prometheus."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Metrics:
    """The counts of one server. It has its own registry, since a process may run several."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "rankup_requests", "Requests answered.", ["path", "status"], registry=self._registry
        )
        self._seconds = Histogram(
            "rankup_request_seconds",
            "Seconds from a request's headers to the end of its answer.",
            ["path"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._batches = Histogram(
            "rankup_batch_size", "Inputs in a batch.", buckets=_BATCHES, registry=self._registry
        )
        self.failures = Counter(
            "rankup_failures", "Requests that failed in the server.", registry=self._registry
        )

    def gauge(self, name: str, help: str, read: Callable[[], float]) -> None:
        Gauge(f"rankup_{name}", help, registry=self._registry).set_function(read)

    def request(self, path: str, status: int, seconds: float) -> None:
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def batch(self, size: int) -> None:
        self._batches.observe(size)

    def text(self) -> bytes:
        return generate_latest(self._registry)
