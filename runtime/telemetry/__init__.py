"""What is measured and logged: metrics, the timeline of an invocation, a function's log.

It must not know where the figures come from.
"""
