"""What an upgrade from one lock to another does to each overlay."""
