"""The inventory: one folder per upstream problem, with notes, a reproducer and receipts. Nothing is imported here."""
