"""The retirement of an overlay: its checklist, its history entry, and the steps that are left to a person."""
