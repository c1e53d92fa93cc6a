"""Relevance of overlays to a model: features, predicates over them, and the configurations that decide them."""
