"""Serves AWS Lambda's invoke API: `/2015-03-31/functions/{function}/invocations`."""
