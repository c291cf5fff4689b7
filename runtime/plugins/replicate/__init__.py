"""Serves the API of Replicate: predictions, models, deployments and files."""
