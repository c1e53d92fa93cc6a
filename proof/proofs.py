"""The proofs that can be asked for, with their subjects and inputs."""

from __future__ import annotations

from dataclasses import dataclass

import bridge_claims
import bridge_launches
import liger_tests_claims
import liger_tests_runs
import megatron_claims
import megatron_context
import megatron_graphs
import megatron_launches
import megatron_layers
import megatron_micro_batch
import megatron_neighbours
import megatron_resumes
import megatron_tests
import megatron_unit_claims
import megatron_unit_tests
import trainer_claims
import trainer_launches
from claims import Subject

SUBJECTS = (
    Subject(
        "trainer",
        "the Trainer of transformers, with Liger's loss of each token",
        trainer_launches.measure,
        trainer_claims.CLAIMS,
        f"{len(trainer_launches.LAUNCHES)} launches",
    ),
    Subject(
        "liger-tests",
        "Liger's own tests of this loss",
        liger_tests_runs.measure,
        liger_tests_claims.CLAIMS,
        "2 runs of pytest",
    ),
)
OF_A_CHECKOUT = (
    Subject(
        "megatron",
        "Megatron-LM's own launcher, DeepSeek sparse attention and experts",
        megatron_launches.measure,
        megatron_claims.CLAIMS,
        megatron_launches.TAKES,
    ),
    Subject(
        "megatron-context",
        "Megatron-LM's launcher over context-parallel ranks",
        megatron_context.measure,
        megatron_context.CLAIMS,
        megatron_context.TAKES,
    ),
    Subject(
        "megatron-resumes",
        "checkpoints of Megatron-LM's launcher, and runs that go on from them",
        megatron_resumes.measure,
        megatron_resumes.CLAIMS,
        megatron_resumes.TAKES,
    ),
    Subject(
        "megatron-micro-batch",
        "the largest micro-batch of Megatron-LM's launcher that fits",
        megatron_micro_batch.measure,
        megatron_micro_batch.CLAIMS,
        megatron_micro_batch.TAKES,
    ),
    Subject(
        "megatron-graphs",
        "Megatron-LM's launcher under CUDA graphs",
        megatron_graphs.measure,
        megatron_graphs.CLAIMS,
        megatron_graphs.TAKES,
    ),
    Subject(
        "megatron-neighbours",
        "checkpoints of Megatron-LM's launcher with an overlay switched off",
        megatron_neighbours.measure,
        megatron_neighbours.CLAIMS,
        megatron_neighbours.TAKES,
    ),
    Subject(
        "megatron-layers",
        "Megatron-LM's launcher, every type of layer together",
        megatron_layers.measure,
        megatron_layers.CLAIMS,
        megatron_layers.TAKES,
    ),
    Subject(
        "megatron-tests",
        "Megatron-LM's own tests of sparse attention",
        megatron_tests.measure,
        megatron_tests.CLAIMS,
        "2 runs of pytest",
    ),
    Subject(
        "megatron-unit-tests",
        "Megatron-LM's own unit tests of what overlays replace",
        megatron_unit_tests.measure,
        megatron_unit_claims.CLAIMS,
        megatron_unit_tests.TAKES,
    ),
)
OF_BRIDGE = (
    Subject(
        "bridge",
        "the pretrain function of megatron-bridge, DeepSeek sparse attention and experts",
        bridge_launches.measure,
        bridge_claims.CLAIMS,
        bridge_launches.TAKES,
    ),
)
NEEDED = ("torch", "triton", "numpy", "transformers", "accelerate", "liger-kernel", "pytest", "megacpp-overlays")
MEGATRON_NEEDED = ("torch", "triton", "numpy", "psutil", "pytest", "megacpp-overlays")
BRIDGE_NEEDED = (
    *("torch", "triton", "numpy", "transformers", "megatron-core", "megatron-bridge", "nvidia-modelopt"),
    "megacpp-overlays",
)
INPUTS = ("locks/proof.txt", "locks/proof-source.txt", "proof/launchers/hf_trainer.py")
"""Files that decide every measurement; their hashes are on the page."""
MEGATRON_INPUTS = ("locks/proof.txt", "proof/launchers/local_stack.py", "proof/on_cpu/sitecustomize.py")
BRIDGE_INPUTS = (
    *("locks/bridge.txt", "locks/bridge-source.txt", "proof/launchers/bridge_pretrain.py"),
    *("proof/launchers/bridge_stand_ins.py", "proof/launchers/local_stack.py", "proof/on_cpu/sitecustomize.py"),
)


@dataclass(frozen=True)
class Proof:
    """Subjects that are proved together."""

    asked: str
    """How it is asked for, in words."""
    subjects: tuple[Subject, ...]
    needed: tuple[str, ...] = NEEDED
    """Distributions without which nothing can be measured."""
    inputs: tuple[str, ...] = INPUTS
    on_gpus: bool = False
    """Whether it computes on GPUs where there are any."""
    command: str = "proof-cpu"
    """Of make, which sets up the environment."""
    lane: str = "proof"


ON_A_CPU = Proof("without --megatron-lm", SUBJECTS)
ON_A_GPU = Proof("with --gpu", SUBJECTS[:1], on_gpus=True)
WITH_A_CHECKOUT = Proof("with --megatron-lm", OF_A_CHECKOUT, MEGATRON_NEEDED, MEGATRON_INPUTS, on_gpus=True)
WITH_BRIDGE = Proof("with --bridge", OF_BRIDGE, BRIDGE_NEEDED, BRIDGE_INPUTS, command="proof-bridge", lane="bridge")
ALL = (ON_A_CPU, ON_A_GPU, WITH_A_CHECKOUT, WITH_BRIDGE)
