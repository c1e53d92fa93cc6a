"""Index scores of DeepSeek sparse attention without the tensor of one score for each head."""
