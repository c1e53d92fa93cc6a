"""The comparison of what is installed and loaded with what was published."""
