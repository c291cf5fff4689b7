"""The worker's part of foreign contracts: it runs handlers for RunPod, Cog and AWS Lambda unchanged.

Start reading at `recognise`, which finds a handler's dialect, or at a dialect's `resolve_*` function. The
gateway's part is in `runtime/dialects`. A module `*_sdk` replaces a foreign package that is not installed.
"""
