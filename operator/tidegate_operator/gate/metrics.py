"""What the gate counts, for Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 1.0)


class Metrics:
    """Counters of one gate; tests make their own.

    Attributes:
        injections: reviews of pods, by `result`.
        evictions: reviews of evictions, by `verdict`.
        reports: by HTTP `status` of the answer.
        transitions: of drains, written by this replica, by new `state` and `reason`.
        failed_passes: over a run, cut short by the API server or an error.
        polls: held now.
        review_seconds: time to answer a review, by `webhook`.
    """

    def __init__(self) -> None:
        """Counts from zero."""
        self._registry = CollectorRegistry()
        self.injections = self._counter("injections", "Reviews of pods.", "result")
        self.evictions = self._counter("evictions", "Reviews of evictions.", "verdict")
        self.reports = self._counter("reports", "Reports of lead sidecars.", "status")
        self.transitions = self._counter(
            "drain_transitions", "Drain states written by this replica.", "state", "reason"
        )
        self.failed_passes = self._counter("failed_passes", "Passes over a run cut short.")
        self.polls = Gauge("tidegate_gate_polls", "Polls held now.", registry=self._registry)
        self.review_seconds = Histogram(
            "tidegate_gate_review_seconds",
            "Time to answer an admission review.",
            ["webhook"],
            buckets=_BUCKETS,
            registry=self._registry,
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"tidegate_gate_{name}_total", text, labels, registry=self._registry)

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self._registry)
