"""Copies weights to a device while they arrive: lays out the device memory, runs the threads, and defines the devices."""
