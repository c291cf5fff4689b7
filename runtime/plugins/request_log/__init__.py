"""Writes sampled and redacted calls of functions to object storage, and their numbers into the metrics.

routes          starts and stops the log of each function with `[request_log]`
function_log    the log of one function: waiting calls, batches, writes
records         makes a line of a call, without the redacted fields
statistics      mean, quantiles and shift of a number
"""
