"""The worker's side of foreign contracts: handlers for RunPod, Cog and AWS Lambda run unchanged.

Enter at `recognise`, which finds a handler's dialect, or at a dialect's `resolve_*` function. The gateway's side is in
`runtime/dialects`. Each foreign package that is not installed has a stand-in, `*_sdk`.
"""
