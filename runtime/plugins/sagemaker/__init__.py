"""This package offers functions to clients of SageMaker's endpoints, and serves a function alone as SageMaker's containers do."""
