"""The command line: what each command does."""
