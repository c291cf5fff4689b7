"""Pure policy of the queue: order, admission, batch forming, assignment to workers.

Enter at `queue.py`. No I/O and no clock: time is an argument. The gateway and the simulator run the same code.
"""
