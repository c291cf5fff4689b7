"""Holds the plugins that ship with pilotflame (dialects, event sources, commands), each in a folder of its own.

`entry_points.py` finds the plugins by their entry points in pyproject.toml. No other room imports a plugin. A plugin
imports no other plugin. The folders `predictions`, `completions` and `amazon` are no plugins, but code that
several plugins share. docs/plugins.md shows how to write a plugin.
"""
