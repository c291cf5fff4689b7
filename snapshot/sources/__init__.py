"""Sources: where the bytes of snapshots are read from, a folder, a web server or S3.

Enter at `locate.open_source`; `source` has the interface. Nothing here knows what the bytes mean.
"""
