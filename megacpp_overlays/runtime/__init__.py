"""Helpers that overlays call while a model runs: torch.compile, CUDA graphs, quantized tensors, the GPUs of a host."""
