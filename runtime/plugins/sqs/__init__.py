"""Runs the messages of SQS queues as jobs, and sends their outputs to a queue or to S3."""
