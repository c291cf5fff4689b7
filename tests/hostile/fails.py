"""Fails, and its error quotes its event."""


def handler(event):
    raise ValueError(str(event)[:100])
