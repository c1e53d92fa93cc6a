"""Static HTML pages: one file each, without a request; a script only filters what is there."""
