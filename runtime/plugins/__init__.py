"""Holds the plugins that ship with pilotflame (dialects, event sources, commands), each in a folder of its own.

`entry_points.py` finds the plugins by their entry points in pyproject.toml. No other room imports a plugin. A plugin
may import the folder `predictions`, which two dialects share, but no other plugin. docs/plugins.md shows how to write
a plugin.
"""
