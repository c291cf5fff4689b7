"""Gathering: which invocations are refused, which run together, and when. Pure: no I/O, no clock."""
