"""Accepts CloudEvents over HTTP: parses events and submits them as jobs."""
