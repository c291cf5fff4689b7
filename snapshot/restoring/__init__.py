"""From files to tensors: a `skeleton`, a plan, a `Mapping`, then `restore`; a `Gate` while bytes arrive."""
