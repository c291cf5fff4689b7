"""Turns an upload into the code and the Python environment that a revision runs, and describes its snapshots.

Start reading at `code.py`, which selects the files of the code, and `environment.py`, which builds environments.
"""
