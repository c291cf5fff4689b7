"""Jobs: invocations that are stored before they are accepted, and what becomes of them."""
