"""The overlays: one module each, with one declaration and its replacement functions."""
