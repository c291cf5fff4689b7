"""Holds the plugins that ship with pilotflame, each in a folder of its own: dialects, event sources, commands.

A plugin is found by its entry points in pyproject.toml (`entry_points.py`). No other room imports a plugin, and a plugin
imports no other folder here but `predictions`, which two dialects share. docs/plugins.md shows how to write a plugin.
"""
