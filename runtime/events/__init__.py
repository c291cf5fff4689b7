"""Event sources: buses whose messages are run as jobs."""
