"""Names the version of Cog that pilotflame is compatible with."""

COG_VERSION = "0.16.12"
