"""Handlers written for others: RunPod, Cog and Lambda files, run as they are."""
