"""Ask four questions as a new user does, in a fresh environment, and keep each command line, its output and its time.

new_user.py --lock locks/summer-2026.txt --json proof/results/new-user.json --write proof/results/new-user.md

The environment is made of a lock and thrown away. The exit code is 1 where a command ends with another code than it should, does not
print the answer, or where a question takes longer than its limit, which is minutes for commands of seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

PROJECT = Path(__file__).resolve().parents[1]
LAUNCHER = """\
#!/bin/bash
MODEL=(
  --num-layers 27 --hidden-size 2048 --num-attention-heads 16 --ffn-hidden-size 10944
  --multi-latent-attention --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128
  --num-experts 64 --moe-router-topk 6 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.001
  --swiglu --normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights
)
TRAIN=(
  --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 512 --train-iters 100000
  --bf16 --lr 4.2e-4 --lr-decay-style cosine --weight-decay 0.1 --use-distributed-optimizer
  --tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 8 --expert-tensor-parallel-size 1
  --save ckpt --load ckpt --ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable
)
torchrun --nproc-per-node 8 --nnodes $NNODES pretrain_gpt.py ${MODEL[@]} ${TRAIN[@]} --data-path data/corpus
"""
JOB = """\
import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

weight = torch.nn.Parameter(torch.ones(4))
optimizer = torch.optim.SGD([weight], lr=0.1)
weight.square().sum().backward()
optimizer.step()
print("the first step was taken")
"""
INTRODUCTION = """\
# Four questions of a new user

Written by `make new-user`, in an environment made of `{lock}` and thrown away afterwards. `train.sh` is a launch script of Megatron-LM for a
mixture of experts with multi-latent attention, `job.py` imports Megatron's scheduler and takes one step of an optimizer. Seconds are those
of a command, {machine}. Longer output is cut in the middle.
"""


class Command(NamedTuple):
    """A command line, and the words that it has to print."""

    line: str
    says: tuple[str, ...] = ()
    code: int = 0


class Question(NamedTuple):
    """A question of a user, its time limit in minutes, and the commands that answer it."""

    asked: str
    minutes: int
    found_in: str
    """Where README or docs name the commands."""
    commands: tuple[Command, ...]


QUESTIONS = (
    Question(
        "Is my run concerned?",
        5,
        'README, "Is it for me?"',
        (
            Command(
                "megacpp-overlays audit --quick --config train.sh",
                ("active concern this model", "mla-rope-key-gradient", "no multi-token prediction"),
            ),
        ),
    ),
    Question(
        "Cover our image",
        15,
        "docs/images.md",
        (
            Command("megacpp-overlays witness", ("nothing that is here is unproved",)),
            Command("megacpp-overlays enable && megacpp-overlays status", ("armed by file", "proved by starting")),
            Command(
                "MEGACPP_OVERLAYS_REQUIRE=scheduler-restore=active python job.py",
                ("active: scheduler-restore", "the first step was taken"),
            ),
            Command(
                "MEGACPP_OVERLAYS_REQUIRE=scheduler-restore=active MEGACPP_OVERLAYS=off python job.py",
                ("RequirementError", "scheduler-restore"),
                code=1,
            ),
            Command(
                "MEGACPP_OVERLAY_SCHEDULER_RESTOR=off python job.py", ("MEGACPP_OVERLAY_SCHEDULER_RESTORE",), code=2
            ),
            Command("megacpp-overlays disable && megacpp-overlays status", ("not armed",), code=3),
        ),
    ),
    Question(
        "My loss jumped after a resume: is it one of yours?",
        2,
        'README, "Is it for me?"',
        (
            Command("megacpp-overlays symptom my loss jumped after a resume", ("scheduler-restore", "broken here")),
            Command("megacpp-overlays explain scheduler-restore", ("MEGACPP_OVERLAY_SCHEDULER_RESTORE", "7468")),
            Command("megacpp-overlays repro 48", ("scheduler-restore",)),
        ),
    ),
    Question(
        "What changes if we take 0.19.2?",
        5,
        'README, "Is it for me?"',
        (
            Command(
                "megacpp-overlays triage --to megatron-core==0.19.2",
                ("quant-recipe-stale-weights", "upstream repaired it", "broken from here on"),
                code=1,
            ),
        ),
    ),
)
HEAD, TAIL = 34, 14
"""Lines of an output that the page keeps from its beginning and its end."""


def main() -> int:
    """Ask, write the receipts and their page; return 1 where an answer is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lock", type=Path, required=True, help="the lock of the environment")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="receipts")
    parser.add_argument("--write", type=Path, required=True, metavar="FILE", help="the page")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        found = measured(given.lock, Path(made))
    given.json.write_text(json.dumps(found, indent=1) + "\n")
    given.write.write_text(page(found))
    for problem in found["problems"]:
        print(problem, file=sys.stderr)
    return int(bool(found["problems"]))


def measured(lock: Path, folder: Path) -> dict[str, Any]:
    """Make an environment in a folder, ask every question in it, and return the outputs and their problems."""
    environment = folder / "venv"
    _made(environment, lock)
    work = folder / "work"
    work.mkdir()
    (work / "train.sh").write_text(LAUNCHER)
    (work / "job.py").write_text(JOB)
    asked = [
        {"asked": each.asked, "answers": [ran(one, environment, work) for one in each.commands]} for each in QUESTIONS
    ]
    return {
        "lock": lock.as_posix(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "questions": asked,
        "problems": [
            problem for question, one in zip(QUESTIONS, asked, strict=True) for problem in problems(question, one)
        ],
    }


def ran(command: Command, environment: Path, work: Path) -> dict[str, Any]:
    """Run a command line in the environment, and return its output, its code and its seconds."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("MEGACPP_", "PYTHON"))}
    env = {
        **ours,
        "PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(work),
        "COLUMNS": "110",
        "CUDA_VISIBLE_DEVICES": "",
    }
    began = time.monotonic()
    done = subprocess.run(
        ["/bin/bash", "-c", command.line], cwd=work, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )  # fmt: skip
    said = done.stdout.replace(str(environment), "/opt/venv").replace(str(work), "/work")
    return {
        "line": command.line,
        "printed": said,
        "code": done.returncode,
        "seconds": round(time.monotonic() - began, 1),
    }


def problems(question: Question, found: dict[str, Any]) -> Iterator[str]:
    """Yield the problems of the answers to a question."""
    for command, answer in zip(question.commands, found["answers"], strict=True):
        if answer["code"] != command.code:
            yield f"{question.asked} {command.line}: ended with {answer['code']}, not {command.code}: {answer['printed'][-400:]}"
        printed = " ".join(answer["printed"].split())
        yield from (
            f"{question.asked} {command.line}: does not say {each!r}" for each in command.says if each not in printed
        )
    if (seconds := sum(each["seconds"] for each in found["answers"])) > 60 * question.minutes:
        yield f"{question.asked} took {seconds:.0f} s"


def page(found: dict[str, Any]) -> str:
    """Return the page."""
    lines = [INTRODUCTION.format(**found)]
    for question, one in zip(QUESTIONS, found["questions"], strict=True):
        seconds = sum(each["seconds"] for each in one["answers"])
        lines += [
            f"## {one['asked']}",
            "",
            f"Commands of {question.found_in}; {seconds:.0f} s of at most {question.minutes} minutes.",
            "",
        ]
        for each in one["answers"]:
            ended = f", ended with {each['code']}" if each["code"] else ""
            lines += [
                "```console",
                f"$ {each['line']}",
                *_cut(each["printed"]),
                f"({each['seconds']} s{ended})",
                "```",
                "",
            ]
    return "\n".join(lines)


def _cut(printed: str) -> list[str]:
    lines = [line.rstrip() for line in printed.splitlines()]
    left_out = len(lines) - HEAD - TAIL
    return lines if left_out <= 1 else [*lines[:HEAD], f"[{left_out} lines]", *lines[-TAIL:]]


def _made(environment: Path, lock: Path) -> None:
    """Make the environment: the lock, and this package as a user installs it."""
    subprocess.run([PROJECT / "scripts/environment.sh", environment, lock.resolve()], check=True)
    uv = subprocess.run([PROJECT / "scripts/uv.sh"], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    subprocess.run([uv, "--quiet", "pip", "install", "--python", environment / "bin/python", PROJECT], check=True)


if __name__ == "__main__":
    sys.exit(main())
