"""Is no attack, but slow."""

import time


def handler(event):
    time.sleep(0.02)
