"""Whether what is installed and loaded is what was published."""
