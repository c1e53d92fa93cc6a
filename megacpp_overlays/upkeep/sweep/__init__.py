"""The state of every upstream thread that an overlay or a pack waits on."""
