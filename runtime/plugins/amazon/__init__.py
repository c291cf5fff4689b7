"""Contains the code that the plugins for the APIs of AWS share."""
