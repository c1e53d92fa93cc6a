"""Attention probabilities summed over heads without the tensor of one probability for each head."""
