"""The HTTP contracts of other platforms: one folder for each (RunPod, Cog, AWS Lambda, CloudEvents).

Enter at a folder's `routes.py`. A dialect translates to jobs and invocations and back. It must not import another dialect:
deleting its folder and its line in the registry removes it. The worker's side of the contracts is `handlers/dialects`.
"""
