"""Measures, logs and explains: metrics, timelines of invocations, logs of functions, errors of the operating system.

Start reading at the module that you need. This package must not import the code that measures or logs.
"""
