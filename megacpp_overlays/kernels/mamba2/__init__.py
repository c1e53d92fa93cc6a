"""Mamba-2 mixers, which Megatron has as `MambaMixer`: convolution and scan in plain PyTorch, documents included."""
