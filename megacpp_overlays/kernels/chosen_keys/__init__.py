"""DSA's indexer over the keys that it chose: tokens times chosen, and never (queries, keys)."""
