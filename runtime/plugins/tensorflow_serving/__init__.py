"""This package offers functions to clients of TensorFlow Serving, and of the first version of KServe's protocol."""
