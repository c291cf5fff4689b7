"""This package runs TorchServe's handlers, and offers functions to its clients."""
