"""Sets the weights of a module from files.

The steps are `skeleton`, `make_plan`, `Mapping` and `restore`, in this order. While bytes still arrive, run the module in
a `Gate`.
"""
