"""Bringing bytes: ranges over several connections, paced by what is measured, verified as they land."""
