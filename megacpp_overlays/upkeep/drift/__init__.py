"""The comparison of installed distributions and loaded modules with their published form."""
