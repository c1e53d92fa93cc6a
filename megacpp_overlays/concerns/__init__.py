"""Which overlays bear on a model: features, predicates over them, and the configurations that decide them."""
