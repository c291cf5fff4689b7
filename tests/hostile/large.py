"""Returns a text of 64 MiB."""


def handler(event):
    return "x" * (64 << 20)
