"""Batch mode: a file of inputs in, a file of answers out, in order."""
