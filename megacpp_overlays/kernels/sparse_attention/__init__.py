"""Attention over keys that each query chose: multi-query attention as DeepSeek sparse attention has it, forward and backward."""
