"""Static HTML pages: one file each, without a script and without a request."""
