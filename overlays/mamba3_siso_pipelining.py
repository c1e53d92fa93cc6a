"""Gate for Mamba-3 SISO, which may be wrong on Blackwell, before the loss of a run shows it.

The decision depends on the GPUs of the host, which are listed without initialising CUDA. Where they are unknown, as on a
login node, the gate names the devices that are concerned.
"""

from __future__ import annotations

from megacpp_overlays.feature_probes import mamba3_siso_pipelining as feature
from megacpp_overlays.model import Gate, Thread
from megacpp_overlays.runtime import gpus

OVERLAY = Gate(
    id="mamba3-siso-pipelining",
    pack=19,
    title="the tuner of the Mamba-3 SISO forward kernel may choose a wrong configuration on Blackwell",
    target=feature.TARGET,
    beside=("triton",),
    probe=feature.probe,
    elsewhere=gpus.elsewhere(frozenset({10, 12})),
    unsupported={
        feature.ANY_STAGES: "on compute capability 10 and 12, build mamba-ssm from main (#997, in no release), or leave one stage in "
        "the configurations of mamba3_siso_fwd_kernel before its first call: kernel.configs = [c for c in kernel.configs if "
        "c.num_stages == 1]; other GPUs are not concerned",
    },
    symptoms=(
        "Mamba-3 is wrong on Blackwell, B200 or GB200",
        "loss of Mamba-3 differs between Hopper and Blackwell",
    ),
    concerns="mamba3",
    breaks="the SISO forward pass may be wrong on Blackwell without an error",
    retire_when="every supported mamba-ssm has #997, or Triton compiles the kernel right",
    threads=(
        Thread(repository="state-spaces/mamba", number=997, state="merged 2026-07-23, in no release on 2026-11-21"),
    ),
    last_validated="2026-11-21, H200: not concerned; read in 2.3.2.post1 and main e9594ce; no Blackwell was at hand",
)
