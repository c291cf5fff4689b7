"""Decides how many workers a revision has. It does no I/O and reads no clock."""
