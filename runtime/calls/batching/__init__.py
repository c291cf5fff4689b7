"""Decides which invocations are admitted, in which order they run, in which batches, and on which worker.

Start reading at `queue.py` and `assignment.py`. Nothing here does I/O or reads a clock: the current time is
an argument, in seconds of one monotonic clock. So the gateway and the simulator can run the same code. This
package must not know about HTTP, processes or the event loop.
"""
