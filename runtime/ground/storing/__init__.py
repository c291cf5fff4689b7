"""The room of what gateways store: connections to PostgreSQL, and the tables there."""
