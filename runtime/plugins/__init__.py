"""Holds the plugins that ship with pilotflame, each in a folder of its own: dialects, event sources, commands.

A plugin is found by its entry points in pyproject.toml (`entry_points.py`); no other room imports one, and none imports another,
but for `predictions`, which two dialects share. docs/plugins.md shows how to write one.
"""
