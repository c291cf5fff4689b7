"""The HTTP contracts of other platforms, one folder for each: RunPod, Cog, AWS Lambda and CloudEvents.

Enter at `registry.py` or at a folder's `routes.py`. A dialect translates requests to jobs and invocations, and these to
responses. It must not import another dialect. The worker's side of the contracts is `handlers/dialects`.
"""
