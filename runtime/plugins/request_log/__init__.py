"""Writes sampled and redacted calls of functions to object storage, and their numbers into the metrics.

routes          starts and stops the log of each function with `[request_log]`
function_log    the log of one function: waiting calls, batches, writes
records         makes a record of a call, without the redacted fields
record_file     puts records into a file: JSON lines or Parquet
statistics      mean, quantiles and shift of a number
"""
