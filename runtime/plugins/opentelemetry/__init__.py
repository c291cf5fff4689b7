"""Exports traces and metrics of invocations, and the logs of functions, to a collector of OpenTelemetry."""
