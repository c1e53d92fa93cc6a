"""The checklist of a retirement, and the change that it prepares."""
