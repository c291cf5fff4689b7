"""Prints escape sequences for the terminal that shows its output: a title, the clipboard, erased lines."""

SEQUENCES = "\x1b]0;title\x07\x1b]52;c;ZXZpbA==\x07\x1b[2K\x1b[1A\x9b31m\r"


def handler(event):
    print(SEQUENCES)
    raise ValueError(SEQUENCES)
