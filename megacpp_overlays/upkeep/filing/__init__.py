"""Whether a pack is fit to be sent upstream, and when; nothing here can send anything."""
