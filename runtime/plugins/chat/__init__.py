"""This package talks to language models in the terminal."""
