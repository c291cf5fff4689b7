"""Copies weights to a device while they arrive. Has the layout of the device memory, the threads and the devices."""
