"""Copies weights to a device while they arrive: the layout there, the threads that copy, and the devices."""
