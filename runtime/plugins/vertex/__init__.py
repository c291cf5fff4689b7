"""This package offers functions to clients of Vertex AI's endpoints, and serves a function alone as its containers do."""
