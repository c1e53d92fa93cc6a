"""Files of a new overlay, in the form of those that are there."""
