"""What is measured and logged: metrics, the timeline of an invocation, the log of a function.

Enter at the module of what you need. It must not know where the figures come from.
"""
