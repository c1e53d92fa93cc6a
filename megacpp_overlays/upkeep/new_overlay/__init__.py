"""Generation of the files of a new overlay, in the form of the existing overlays."""
