"""From bytes to tensors: mapped, copy-on-write views in a module, usable while they still arrive."""
