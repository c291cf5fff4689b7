"""Holds what is measured, logged and told: metrics, timelines of invocations, logs of functions, what the system refuses.

Start reading at the module that you need. This package must not import the code that measures or logs.
"""
