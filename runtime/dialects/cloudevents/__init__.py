"""CloudEvents 1.0 over HTTP: parsing of the three modes, and routes that turn each event into a job."""
