"""Returns its event."""


def handler(event):
    return event
