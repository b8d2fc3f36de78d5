"""The figures of a job for other systems: Prometheus, OTLP. Nothing of it is imported where nobody asked for it."""
