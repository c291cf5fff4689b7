"""Holds what is measured and logged: metrics, the timelines of invocations and the logs of functions.

Start reading at the module that you need. This package must not import the code that measures or logs.
"""
