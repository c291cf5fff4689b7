"""Runs the messages of Kafka topics as jobs, in order for each key, and sends their outputs to another topic."""
