"""One live revision: its queue, its dispatcher, its pool of replicas, and the deadlines of its invocations.

Enter at `revision.py`. Decisions come from `batching` and `scaling`; processes come from `launching`. It must not know HTTP,
jobs or what is deployed.
"""
