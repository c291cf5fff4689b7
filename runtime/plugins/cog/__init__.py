"""Serves Cog's predictions API: `/predictions` and `/health-check`."""
