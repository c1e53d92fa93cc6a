"""Helpers that overlays call while a model or a self-test runs: torch.compile, CUDA graphs, quantized tensors, the GPUs of a host."""
