"""Exports traces and metrics of invocations to a collector of OpenTelemetry."""
