"""Stand-in for `module` of Megatron-LM dev: same names, signatures and behaviour, none of its code."""

import torch


class MegatronModule(torch.nn.Module):
    """A module that keeps its configuration."""

    def __init__(self, config):
        super().__init__()
        self.config = config


class GraphableMegatronModule(MegatronModule):
    """A module that may be captured; none is here."""

    def __init__(self, config, vp_stage=None):
        super().__init__(config)
