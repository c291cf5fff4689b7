"""A snapshot's bytes into files, over several connections. Enter at `fetch.fetch`; knows no cache."""
