"""Where bytes come from: a folder, HTTP, S3. A backend a file, behind one small interface."""
