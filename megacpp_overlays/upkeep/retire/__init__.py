"""The checklist of a retirement, its history entry, and the steps that are left to a person."""
