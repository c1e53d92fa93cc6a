"""The recipes of docs/launchers.md, each with the released library that it names: `make launchers` sets up the environments.

A launcher that computes on a CPU is run to its end. One that wants a GPU is run as far as its imports go: its processes have to be
armed before the first module of the launcher, and to decide about the modules of Megatron that it imports.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import installed
import pytest
from places import HANG_S, ROOT

LAUNCHERS = ROOT / "proof/launchers"
PAGE = (ROOT / "docs/launchers.md").read_text()
RUN = ("-m", "megacpp_overlays", "run")
LIGER = "liger-flce-none-backward"
LOSS = "liger_kernel.ops.fused_linear_cross_entropy.LigerFusedLinearCrossEntropyFunction"
USED_BY_ALL = {"float16-fp32-exemption", "fully-reshardable-padding", "scheduler-restore", "seq-aux-loss-packed"}
"""Overlays of modules that every launcher of Megatron imports, all broken in megatron-core 0.19.2."""

pytestmark = [pytest.mark.full, pytest.mark.upstream, pytest.mark.unmeasured_children]


python_of = functools.partial(installed.python_of, made_by="make launchers")


def launch(words: list[Any], folder: Path, *, path: tuple[Path, ...] = (), **variables: str) -> Any:
    """Run a command on the CPU in a folder; `log.jsonl` in it has the decisions of each of its processes."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MEGACPP_")}
    quiet = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRITON_INTERPRET": "1"}
    env = {**kept, **quiet, "MEGACPP_OVERLAYS_LOG": str(folder / "log.jsonl"), **variables}
    env["PYTHONPATH"] = os.pathsep.join(map(str, path))
    return subprocess.run(
        [str(word) for word in words], env=env, cwd=folder, capture_output=True, text=True, check=False, timeout=HANG_S
    )


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Return the lines of the log of one kind."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == kind]


def decided(folder: Path) -> dict[str, set[str]]:
    """Return the decisions of each overlay in all processes."""
    found: dict[str, set[str]] = {}
    for line in events(folder, "decision"):
        found.setdefault(line["id"], set()).add(line["decision"])
    return found


def versions(lane: str) -> dict[str, str]:
    pins = (ROOT / f"locks/{lane}.txt").read_text().splitlines()
    return dict(line.split(" ")[0].split("==") for line in pins if "==" in line and not line.startswith("#"))


@pytest.mark.parametrize(
    ("lane", "names"),
    [
        ("launchers", ("transformers", "accelerate", "trl", "kernels", "liger-kernel")),
        ("swift", ("ms-swift", "mcore-bridge", "megatron-core")),
        ("foreign", ("verl", "megatron-bridge")),
        ("engines", ("ray",)),
    ],
)
def test_the_page_names_the_releases_that_the_recipes_are_run_with(lane: str, names: tuple[str, ...]) -> None:
    pinned = versions(lane)

    assert [name for name in names if f"{name} {pinned[name]}" not in PAGE.lower()] == []


# --- Hugging Face ---

ACCELERATE = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.parametrize(
    "words",
    [(), (*ACCELERATE, "--mixed_precision", "no", "--dynamo_backend", "no"), TORCHRUN],
    ids=["Trainer", "accelerate launch", "torchrun"],
)
def test_a_trainer_has_the_repaired_loss_however_it_is_launched(words: tuple[str, ...], tmp_path: Path) -> None:
    audit = tmp_path / "audit.json"
    ranks = ["--verify-ranks"] if words else []
    command = [python_of("launchers"), *RUN, "--audit", audit, *ranks, *words, LAUNCHERS / "ranked_trainer.py"]

    done = launch(command, tmp_path, ACCELERATE_USE_CPU="true")

    assert done.returncode == 0, done.stdout + done.stderr
    left = json.loads(audit.read_text())
    assert {each["decision"] for each in left["decisions"] if each["id"] == LIGER} == {"active"}
    assert left.get("ranks") == ({"size": 2, "agreed": True} if words else None)


def test_trl_takes_its_own_loss_and_the_overlay_is_named_as_never_called(tmp_path: Path) -> None:
    python = python_of("launchers")

    done = launch([python, *RUN, LAUNCHERS / "trl_sft.py", tmp_path / "out"], tmp_path)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "`use_liger_kernel=True` is deprecated" in done.stderr
    assert decided(tmp_path)[LIGER] == {"active"}
    assert LIGER in events(tmp_path, "count")[-1]["never_called"]


def test_trl_refuses_the_fused_loss_of_liger(tmp_path: Path) -> None:
    done = launch([python_of("launchers"), *RUN, LAUNCHERS / "trl_sft.py", tmp_path / "out", "--fused"], tmp_path)

    assert done.returncode != 0
    assert '`liger_kernel_config={"fused_linear_cross_entropy": True}` is not supported' in done.stderr


@pytest.fixture
def hub_kernel(tmp_path: Path) -> Path:
    """A folder as a kernel of the Hub has it, with the files of the released Liger, as `kernels-community/liger-kernels` has them."""
    lane = Path(python_of("launchers")).parents[1]
    (released,) = lane.glob("lib/python3.*/site-packages/liger_kernel")
    folder = tmp_path / "kernel"
    variant = folder / "build/torch-cpu"
    variant.mkdir(parents=True)
    for name in ("fused_linear_cross_entropy", "cross_entropy", "utils"):
        text = (released / f"ops/{name}.py").read_text()
        text = text.replace("from liger_kernel.ops.", "from .").replace("from liger_kernel.utils", "from .devices")
        (variant / f"{name}.py").write_text(text)
    shutil.copy(released / "utils.py", variant / "devices.py")
    (variant / "__init__.py").write_text("from . import fused_linear_cross_entropy\n")
    about = {"id": "_liger_kernels_cpu_0", "name": "liger-kernels", "version": 3, "license": "BSD-2-Clause"}
    about |= {"python-depends": [], "backend": {"type": "cpu"}}
    (variant / "metadata.json").write_text(json.dumps(about))
    return folder


def test_a_copy_of_liger_from_the_hub_is_named_in_the_log_and_the_audit(hub_kernel: Path, tmp_path: Path) -> None:
    audit = tmp_path / "audit.json"
    script = [LAUNCHERS / "hub_kernel.py", hub_kernel]

    done = launch([python_of("launchers"), *RUN, "--audit", audit, *script], tmp_path)

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "LigerFusedLinearCrossEntropyFunction\n"
    said = [line["text"] for line in events(tmp_path, "hub copy") if line["text"].startswith(LIGER)]
    assert len(said) == 1
    assert "was loaded from the Hub by `kernels` and has a copy of liger-kernel's Liger" in said[0]
    assert str(hub_kernel / "build/torch-cpu/fused_linear_cross_entropy.py") in said[0]
    assert said[0] in json.loads(audit.read_text())["hub_copies"]


def test_an_audit_prints_the_copy_and_without_a_kernel_says_nothing_of_one(hub_kernel: Path, tmp_path: Path) -> None:
    python = python_of("launchers")
    load = f"from kernels import get_local_kernel; from pathlib import Path; get_local_kernel(Path({str(hub_kernel)!r}), backend='cpu')"
    shown = "; print(megacpp_overlays.audit())"

    without = launch([python, "-c", f"import megacpp_overlays, kernels{shown}"], tmp_path)
    having = launch([python, "-c", f"import megacpp_overlays; {load}{shown}"], tmp_path)

    assert (without.returncode, having.returncode) == (0, 0), without.stderr + having.stderr
    assert "out of reach" not in without.stdout
    assert "out of reach: code from the Hugging Face Hub" in having.stdout
    assert max(map(len, having.stdout.splitlines())) < 80


# --- Megatron's launchers, as far as their imports go without a GPU ---

HALF = "import engine_python_half\nengine_python_half.without_compiled_half()\n"
SEEN_FIRST = """
import sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name in {first!r}:
            print("FIRST", name, "megacpp_overlays" in sys.modules, flush=True)
sys.meta_path.insert(0, Watch())
"""


def stand_in(folder: Path, first: tuple[str, ...]) -> tuple[Path, ...]:
    """Write a start-up file: Transformer Engine's Python half alone, and whether a module is imported armed."""
    (folder / "half").mkdir()
    (folder / "half/sitecustomize.py").write_text(HALF + SEEN_FIRST.format(first=first))
    return (folder / "half", LAUNCHERS)


def check_armed_before(done: Any, folder: Path, module: str) -> None:
    seen = [line.split() for line in done.stdout.splitlines() if line.startswith("FIRST")]
    assert [module, "True"] in [each[1:] for each in seen], done.stdout + done.stderr
    assert all(armed == "True" for _, name, armed in seen if name == module)
    found = decided(folder)
    assert {name for name in USED_BY_ALL if found.get(name, set()) & {"active", "conflict"}} == USED_BY_ALL


def test_megatron_sft_of_ms_swift_is_armed_before_its_modules_and_decides(tmp_path: Path) -> None:
    python = python_of("swift")
    path = stand_in(tmp_path, ("swift.megatron",))

    done = launch([python, *RUN, Path(python).with_name("megatron"), "sft", "--help"], tmp_path, path=path)

    check_armed_before(done, tmp_path, "swift.megatron")


VERL = """
import ray
from verl.single_controller.base import Worker

@ray.remote
class Actor:
    def look(self):
        import sys
        armed = "megacpp_overlays" in sys.modules
        import verl.workers.engine.megatron.transformer_impl
        import megacpp_overlays
        found = {each["id"]: each["decision"] for each in megacpp_overlays.audit().as_dict()["decisions"]}
        return armed, found

import json, sys
from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
ray.init(num_cpus=1, include_dashboard=False, _temp_dir=sys.argv[1], runtime_env=get_ppo_ray_runtime_env())
print(json.dumps(ray.get(Actor.remote().look.remote())))
"""


def test_megatron_workers_of_verl_in_ray_are_armed_and_decide(tmp_path: Path) -> None:
    python = python_of("foreign")
    path = stand_in(tmp_path, ("verl.workers.engine.megatron.transformer_impl",))
    (tmp_path / "driver.py").write_text(VERL)

    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as sockets:
        done = launch([python, *RUN, "driver.py", sockets], tmp_path, path=path, RAY_USAGE_STATS_ENABLED="0")

    assert done.returncode == 0, done.stdout + done.stderr
    armed, found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[")))
    assert armed
    assert {name for name in USED_BY_ALL if found[name] in {"active", "conflict"}} == USED_BY_ALL


PRETRAIN = """
import bridge_stand_ins  # names of packages that its annotations ask for
from megatron.bridge.training.pretrain import pretrain
print(pretrain.__module__)
"""


def test_the_pretrain_function_of_megatron_bridge_is_armed_before_its_modules_and_decides(tmp_path: Path) -> None:
    python = python_of("foreign")
    path = stand_in(tmp_path, ("megatron.bridge",))
    elastic = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    (tmp_path / "train.py").write_text(PRETRAIN)

    done = launch([python, *RUN, *elastic, "train.py"], tmp_path, path=path, MAKEFLAGS="--eval=made:;")

    assert done.returncode == 0, done.stdout + done.stderr
    check_armed_before(done, tmp_path, "megatron.bridge")
