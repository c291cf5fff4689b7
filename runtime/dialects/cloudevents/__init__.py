"""CloudEvents over HTTP: parsing events and submitting them as jobs."""
