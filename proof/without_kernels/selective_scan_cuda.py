"""Nothing, where mamba-ssm was built without its compiled kernels: it imports those of Mamba-1, which no layer of the proof calls."""
