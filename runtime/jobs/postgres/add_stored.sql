-- Adds the stored bytes of an owner to those that are there.
INSERT INTO stored (owner, bytes) VALUES ($1, $2)
ON CONFLICT (owner) DO UPDATE SET bytes = stored.bytes + excluded.bytes
