"""Names the version of Cog whose contract is kept."""

COG_VERSION = "0.16.12"
