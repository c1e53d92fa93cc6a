"""Pack 10: the devices that the dispatcher of the fused linear cross entropy serves, on stand-ins and on real source trees.

Devices are made up: torch answers for a GPU that is not there. Each tree runs in interpreters of its own.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from places import ROOT, SUPPORT
from probing import ask
from trees import STAND_INS
from warm_python import MEGATRON

from megacpp_overlays.feature_probes import hopper_flce_dispatch as feature
from megacpp_overlays.model import Verdict
from megacpp_overlays.overlays.hopper_flce_dispatch import BACKWARD, FORWARD
from megacpp_overlays.source.file_trees import DirectoryTree

OPTION = "--upstream-tree"
PORTABLE = "megacpp_overlays.kernels.linear_cross_entropy.entry"
BLACKWELL = "megatron.core.fusions.linear_cross_entropy.blackwell.entry"
HOPPER = "megatron.core.fusions.linear_cross_entropy.hopper.entry"

Report = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def reports() -> dict[object, dict[str, Any]]:
    return {}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every test here on the stand-ins and the given trees whose dispatcher lacks branches."""
    if "dispatcher" in metafunc.fixturenames:
        given = {f"upstream-{path.resolve().name}": path.resolve() for path in metafunc.config.getoption(OPTION)}
        every = {**STAND_INS, **given}
        broken = {name: path for name, path in every.items() if verdict(path) is Verdict.BROKEN}
        metafunc.parametrize("dispatcher", list(broken.values()), ids=list(broken))


@functools.cache
def verdict(tree: Path) -> Verdict:
    return ask(feature.probe, DirectoryTree(tree)).verdict


@pytest.fixture
def report(dispatcher: Path, reports: dict[object, dict[str, Any]], run_python: Callable[..., Any]) -> Report:
    """Return the report of `hopper_flce_report.py` on the tree of this test. Each combination of switches runs once."""
    pytest.importorskip("triton")

    def run(**switches: str) -> dict[str, Any]:
        key = (dispatcher, *sorted(switches.items()))
        if key not in reports:
            code = "import runpy; runpy.run_module('hopper_flce_report', run_name='__main__')"
            folders = (dispatcher, ROOT, SUPPORT)
            switches = {"MEGACPP_OVERLAYS_LOG": "logging", "PYTHONWARNINGS": "ignore", **switches}
            done = run_python(code, *folders, measured=len(key) == 1, after=MEGATRON, **switches)
            reports[key] = json.loads(done.stdout.splitlines()[-1])
        return reports[key]

    return run


off = functools.partial(dict, MEGACPP_OVERLAYS="off")


def refused(major: int) -> str:
    return f"ValueError: Unsupported architecture: {major}"


def test_without_the_overlay_other_gpus_are_refused(report: Report) -> None:
    found = report(**off())

    assert found["decision"] == "disabled"
    assert {major: found["answers"][major] for major in ("8", "12")} == {"8": refused(8), "12": refused(12)}


def test_with_it_they_get_the_portable_entry(report: Report) -> None:
    found = report()

    assert found["decision"] == "active", found["reason"]
    assert (found["answers"]["8"], found["answers"]["12"]) == (PORTABLE, PORTABLE)


def test_hopper_gets_upstream_s_own_entry_where_the_tree_has_one(report: Report) -> None:
    with_overlay, without = report(), report(**off())

    upstream_serves = without["answers"]["9"] == HOPPER
    assert with_overlay["answers"]["9"] == (HOPPER if upstream_serves else PORTABLE)


def test_every_other_device_keeps_upstream_s_answer(report: Report) -> None:
    with_overlay, without = report(), report(**off())

    for major in ("7", "10", "11"):
        assert with_overlay["answers"][major] == without["answers"][major]
    assert with_overlay["answers"]["7"] == refused(7)
    assert with_overlay["without cuda"] == without["without cuda"] == "AssertionError: CUDA is not available"


def test_blackwell_keeps_the_entry_that_upstream_defines_once_its_kernels_are_imported(report: Report) -> None:
    """Upstream defines the entry below `try: import`. Its parameters are those of the portable entry."""
    found, without_kernels = report(KERNELS="1"), report()

    assert found["decision"] == "active", found["reason"]
    assert found["blackwell entry"] == {"forward": [*FORWARD], "backward": [*BACKWARD]}
    assert found["answers"]["10"] == BLACKWELL
    assert (found["answers"]["8"], found["answers"]["12"]) == (PORTABLE, PORTABLE)
    assert found["answers"]["9"] == (PORTABLE if found["shape"] == feature.BLACKWELL_ONLY else HOPPER)
    assert without_kernels["blackwell entry"] is None
    assert without_kernels["answers"]["10"].startswith("AttributeError")


def test_the_capability_of_an_amd_gpu_means_something_else(report: Report) -> None:
    assert report()["amd"] == refused(12)


def test_a_failed_call_does_not_stand_in_the_way_of_the_next(report: Report) -> None:
    assert report()["after a failure"] == PORTABLE


def test_the_device_is_asked_once(report: Report) -> None:
    found = report()

    assert found["on another device later"] == PORTABLE
    assert found["asked again"] == 0


def test_upstream_s_singleton_stays_as_the_refusal_left_it(report: Report) -> None:
    assert not report()["singleton is initialised"]


def test_undoing_brings_the_refusal_back_though_an_entry_was_handed_out(report: Report) -> None:
    assert report()["undone"] == refused(12)


def test_the_overlay_may_come_after_the_target_and_after_a_failed_call(report: Report) -> None:
    found = report(LATE="1")

    assert found["before"] == refused(9) or found["before"].startswith(("AttributeError", HOPPER))
    assert found["decision"] == "active", found["reason"]
    assert found["after"] in (PORTABLE, HOPPER)
    assert found["answers"] == report()["answers"]


def test_a_hopper_entry_without_its_kernels_is_replaced_with_a_warning(report: Report) -> None:
    found, without = report()["hopper without kernels"], report(**off())["hopper without kernels"]

    if report()["shape"] == feature.BLACKWELL_ONLY:
        assert found is None
        return
    assert found["answer"] == PORTABLE
    assert "has no kernels here" in found["logged"][0]
    assert without["answer"].startswith("AttributeError")


def test_cpu_tensors_get_a_clear_error(report: Report) -> None:
    expected = "the fused linear cross entropy needs its tensors on one CUDA device"

    assert report()["cpu tensors"].startswith(expected)


def test_cuda_is_never_initialised(report: Report) -> None:
    found = report()

    assert not found["cuda after import"]
    assert not found["cuda"]


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("        return loss\n", "        return loss / kept\n", 'with reduction "none" the loss'),
        (
            "        return for_hidden, for_weight,",
            "        return for_hidden / num_valid_tokens, for_weight / num_valid_tokens,",
            'with reduction "none" the gradient of the hidden states',
        ),
    ],
    ids=["loss", "gradients"],
)
def test_an_upstream_that_divides_once_more_keeps_its_refusal(
    tmp_path: Path, run_python: Callable[..., Any], old: str, new: str, reason: str
) -> None:
    shutil.copytree(STAND_INS["dev-linear-cross-entropy"], tmp_path, dirs_exist_ok=True)
    file = tmp_path / "megatron/core/fusions/fused_linear_cross_entropy.py"
    assert file.read_text().count(old) == 1
    file.write_text(file.read_text().replace(old, new))
    code = (
        "import megacpp_overlays, torch;"
        "from megacpp_overlays.feature_probes import hopper_flce_dispatch as feature;"
        "from megacpp_overlays.source.findings import broken;"
        "from megacpp_overlays.model import Evidence;"
        "feature.forms.finding = lambda *_: broken(feature.BLACKWELL_ONLY, Evidence('as if read'));"  # the first lock: neither body was read
        "import megatron.core.fusions.fused_linear_cross_entropy as m;"
        "r = next(r for r in megacpp_overlays.audit().records if r.overlay.pack == 10);"
        "print(r.decision.value, hasattr(m._get_platform, '__wrapped__'), torch.cuda.is_initialized(), r.reason)"
    )

    done = run_python(code, tmp_path, ROOT, after=MEGATRON, MEGACPP_OVERLAYS_LOG="logging", PYTHONWARNINGS="ignore")

    assert done.stdout.startswith("conflict True False ")  # upstream's own getter is a cache around a function
    assert f"{reason} is not that of the logits" in done.stdout
