"""The worker's side of other platforms' contracts: RunPod, Cog and AWS Lambda handlers run unchanged.

Enter at `recognise.py`, which finds a handler's dialect, or at a dialect's `resolve_*` function. The gateway's side is
`runtime/dialects`.
"""
