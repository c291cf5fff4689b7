"""Cog's predictions API (`/predictions`): routes, and the conversion of jobs to and from predictions."""
