"""Serves the HTTP APIs of other platforms, each in a folder of its own.

They are RunPod, Cog, Replicate, AWS Lambda and CloudEvents. Start reading at `registry.py` or at the
`routes.py` of a folder. A dialect turns requests into jobs and invocations, and their results into responses.
It must not import another dialect. The part of the dialects that runs in workers is `handlers/dialects`.
"""
