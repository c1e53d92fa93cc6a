"""Numerical code. Imported only inside the function that installs a seam; torch is loaded by then."""
