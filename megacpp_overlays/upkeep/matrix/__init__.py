"""The matrix: the finding of every probe in every release, from archives that are read and never imported."""
