"""Pure policy of the queue: order, admission, forming batches, assigning them to workers.

Enter at `queue.py` and `assignment.py`. Nothing here does I/O or reads a clock: time is an argument, in
seconds of one monotonic clock. The gateway and the simulator run the same code. It must not know HTTP,
processes or the event loop.
"""
