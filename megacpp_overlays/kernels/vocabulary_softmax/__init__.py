"""Softmax over a sharded vocabulary, a block of logits at a time."""
