"""This package holds what the plugins for the APIs of AWS share."""
