"""The routes: HTTP to invocations and jobs, in every spelling, and back."""
