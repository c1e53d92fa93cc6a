"""Mamba-3: the plain truth of its MIMO scan, and the sum over groups of heads in its backward pass."""
