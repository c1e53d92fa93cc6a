"""Checks before a pack is sent upstream. Nothing here can send anything."""
