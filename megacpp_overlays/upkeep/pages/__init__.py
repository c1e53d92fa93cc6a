"""Static HTML pages: one file each, without requests; scripts only filter the content of the page."""
