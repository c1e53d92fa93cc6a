"""The effect on each overlay of an upgrade from one lock to another."""
