"""The connection between gateway and worker: frames, stream credit, and what a worker must know of its revision.

Enter at `link.py`. Both sides use it, so it must know neither of them.
"""
