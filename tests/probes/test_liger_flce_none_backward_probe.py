"""The probe of pack 09: what it says of releases that were read, and that it never repairs what it does not know."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from edited_code import appended
from probing import ask, parsed_once
from releases import daily
from repair_cases import CASES

from megacpp_overlays.feature_probes import liger_flce_none_backward as feature
from megacpp_overlays.model import Body, Finding, Proof, Verdict
from megacpp_overlays.overlays.liger_flce_none_backward import OVERLAY
from megacpp_overlays.source.trees import ModuleSource

KERNEL_MODULE = "liger_kernel.ops.cross_entropy"

Wheel = Callable[[str, str], Path]

DETACHED = (Verdict.BROKEN, feature.DETACHED)  # per-token losses; a forward pass without gradients works
ANY_INPUT = (Verdict.BROKEN, feature.INPUT_NEEDS_GRADIENT)  # 0.6.3 leaves grad_weight unbound without them
WITH_BIAS = (Verdict.BROKEN, feature.BIAS_NEEDS_GRADIENT)  # 0.6.4 detaches a bias gradient that may be None

DISTINCT = {
    "0.5.3": DETACHED,
    "0.6.3": ANY_INPUT,
    "0.6.4": WITH_BIAS,
    "0.6.5": WITH_BIAS,
    "0.8.0": DETACHED,
    "0.8.1": DETACHED,
}
"""The releases whose texts differ, of those that are repaired."""
DAILY = daily(*DISTINCT, older="0.6.3")


class Edited:
    """A release in which the text of some modules is ours."""

    def __init__(self, wheel: Path, **texts: str) -> None:
        self._wheel = parsed_once(wheel)
        self._texts = texts

    def module(self, name: str) -> ModuleSource | None:
        source = self._wheel.module(name)
        text = self._texts.get(name.rsplit(".", 1)[-1])
        return source if text is None or source is None else ModuleSource(name, source.path, text)


@functools.cache
def text_of(wheel: Path, name: str) -> str:
    source = parsed_once(wheel).module(name)
    assert source is not None
    return source.text


def examine(wheel: Path, text: str) -> Finding:
    """Return what the loader makes of a release with another text of the target module."""
    return ask(OVERLAY.probe, Edited(wheel, fused_linear_cross_entropy=text))


def is_installable(finding: Finding) -> bool:
    return finding.verdict is Verdict.BROKEN and finding.shape in OVERLAY.replacements


@pytest.mark.parametrize("version", DISTINCT)
def test_the_evidence_names_the_releases_that_the_text_is_from(wheel: Wheel, version: str) -> None:
    finding = OVERLAY.probe(parsed_once(wheel("liger-kernel", version)))

    assert (finding.verdict, finding.shape) == DISTINCT[version]
    assert f"as in {version}" in finding.summary()


def test_without_the_package_the_target_is_absent(tmp_path: Path) -> None:
    from megacpp_overlays.source.file_trees import DirectoryTree

    assert OVERLAY.probe(DirectoryTree(tmp_path)).verdict is Verdict.ABSENT


# What does not change the meaning does not change the verdict.


def without_docstrings(text: str) -> str:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return ast.unparse(tree)


@pytest.mark.parametrize("version", DAILY)
@pytest.mark.parametrize(
    "edit",
    [
        lambda text: "# a licence\n\n\n" + text.replace("\n    BT, H", "  # noted\n\n    # sizes\n    BT, H"),
        lambda text: '"""A module."""\n' + text.replace("Fusing the last linear layer", "It fuses the last layer"),
        lambda text: ast.unparse(ast.parse(text)),
        without_docstrings,
    ],
    ids=["comments and blank lines", "docstrings", "layout", "no docstrings"],
)
def test_comments_docstrings_and_layout_do_not_matter(wheel: Wheel, version: str, edit: Callable[[str], str]) -> None:
    release = wheel("liger-kernel", version)
    text = text_of(release, feature.MODULE)
    edited = edit(text)

    finding = examine(release, edited)

    assert edited != text
    assert (finding.verdict, finding.shape) == DISTINCT[version]


# What does change it is never repaired, whatever else the verdict is.


def replaced(old: str, new: str) -> Callable[[str], str]:
    def edit(text: str) -> str:
        assert old in text
        return text.replace(old, new, 1)

    return edit


EDITS = {
    "scaling dropped": replaced("if not torch.equal(grad_output,", "if False and not torch.equal(grad_output,"),
    "scaled by row": replaced("grad_input.stride(-2),\n            grad_output,", "grad_input.stride(-2),\n            grad_output[0],"),
    "nothing scaled as known": lambda text: text.replace("            grad_output,\n", "            grad_output[0],\n"),
    "something else asserted": replaced("    # If cross entropy is the last layer", "    assert grad_input is not None\n    #"),
    "rejected": replaced("    # If cross entropy is the last layer", "    assert grad_output.ndim == 0\n    #"),
    "function renamed": lambda text: text.replace("fused_linear_cross_entropy_backward", "flce_backward"),
    "class renamed": lambda text: text.replace("LigerFusedLinearCrossEntropyFunction", "LigerFLCE"),
    "decorator added": replaced("    @amp_custom_bwd\n", "    @amp_custom_bwd\n    @torch.no_grad()\n"),
    "decorator removed": replaced("    @amp_custom_bwd\n", ""),
    "class decorated": replaced("class LigerFused", "@torch.jit.ignore\nclass LigerFused"),
    "other base": replaced("(torch.autograd.Function)", "(Base)"),
    "one gradient fewer": replaced("            grad_bias,\n            None,\n", "            grad_bias,\n"),
    "method added": lambda text: text + "\n    @classmethod\n    def apply(cls, *args):\n        return None\n",
    "second class": appended("class LigerFusedLinearCrossEntropyFunction(torch.autograd.Function):\n    pass"),
    "second function": appended("def fused_linear_cross_entropy_backward(*args):\n    return args[1:]"),
    "second function in a branch": appended("if True:\n    def fused_linear_cross_entropy_backward(*a): ..."),
    "function rebound": appended("fused_linear_cross_entropy_backward = wrap(fused_linear_cross_entropy_backward)"),
    "method rebound": appended("LigerFusedLinearCrossEntropyFunction.backward = staticmethod(fixed)"),
    "method rebound by name": appended("setattr(LigerFusedLinearCrossEntropyFunction, 'backward', fixed)"),
    "function imported over": appended("from elsewhere import fused_linear_cross_entropy_backward"),
    "kernel from elsewhere": replaced("from liger_kernel.ops.utils import element_mul_kernel", "from vendor import element_mul_kernel"),
    "loss of a chunk changed": replaced("loss_1d[start_idx:end_idx] = loss_1d_slice", "loss_1d[start_idx:end_idx] = loss_1d_slice * 2"),
    "mean of the tokens": replaced("        loss = loss_1d\n", "        loss = loss_1d.mean()\n"),
    "sum of the tokens": replaced("        loss = loss_1d\n", "        loss = torch.sum(loss_1d)\n"),
    "not a module": lambda text: text[: len(text) // 2] + "\n  )(",
    "empty": lambda text: "",
}  # fmt: skip


@pytest.mark.unmeasured
@pytest.mark.parametrize("version", daily(*DISTINCT, older="0.8.1"))
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_a_changed_release_is_never_repaired(wheel: Wheel, version: str, edit: Callable[[str], str]) -> None:
    release = wheel("liger-kernel", version)

    finding = examine(release, edit(text_of(release, feature.MODULE)))

    assert not is_installable(finding), finding
    assert finding.verdict is not Verdict.FIXED, finding


@pytest.mark.parametrize("version", DAILY)
def test_a_release_whose_kernel_computes_another_loss_is_not_repaired(wheel: Wheel, version: str) -> None:
    release = wheel("liger-kernel", version)
    kernel = text_of(release, KERNEL_MODULE)
    changed = kernel.replace("z_loss = lse_square_scale * lse * lse", "z_loss = lse_square_scale * lse")

    finding = ask(OVERLAY.probe, Edited(release, cross_entropy=changed))

    assert changed != kernel
    assert finding.verdict is Verdict.UNRECOGNISED
    assert KERNEL_MODULE in finding.summary()


@pytest.mark.parametrize(
    "tail", ["LOG2_E = 1.0", "def tanh(x):\n    return x", "liger_cross_entropy_kernel = other", "import other as tl"]
)
def test_what_the_kernel_reads_beside_itself_counts(wheel: Wheel, tail: str) -> None:
    release = wheel("liger-kernel", "0.8.1")
    changed = f"{text_of(release, KERNEL_MODULE)}\n{tail}\n"

    finding = ask(OVERLAY.probe, Edited(release, cross_entropy=changed))

    assert finding.verdict is Verdict.UNRECOGNISED


def test_the_parts_of_two_releases_together_are_not_a_release(wheel: Wheel) -> None:
    older, newer = wheel("liger-kernel", "0.8.0"), wheel("liger-kernel", "0.8.1")

    finding = ask(OVERLAY.probe, Edited(newer, cross_entropy=text_of(older, KERNEL_MODULE)))

    assert finding.verdict is Verdict.UNRECOGNISED


@pytest.mark.parametrize(
    "edit",
    [
        replaced("grad_logits_chunk * token_grad_output", "grad_logits_chunk * 1 #"),
        replaced("token_grad_output=grad_output", "token_grad_output=None"),
    ],
    ids=["not applied", "not handed over"],
)
def test_the_argument_alone_is_not_the_fix(wheel: Wheel, edit: Callable[[str], str]) -> None:
    release = wheel("liger-kernel", "0.8.2")
    # The multiplication spans three lines; what is left of it is a call on a line of its own.
    text = ast.unparse(ast.parse(text_of(release, feature.MODULE)))

    finding = examine(release, edit(text))

    assert finding.verdict is Verdict.UNRECOGNISED


@pytest.mark.parametrize(
    "code",
    [
        f"{feature.FUNCTION} = older",
        f"{feature.FUNCTION}.backward = staticmethod(older)",
        f"for {feature.FUNCTION} in older: ...",
        f"from elsewhere import older as {feature.CORE_FORWARD}",
        f"def patch():\n    global {feature.CORE_FORWARD}\n    {feature.CORE_FORWARD} = older",
        "globals().update(fused_linear_cross_entropy_backward=older)",
    ],
)
def test_a_repair_whose_name_means_something_else_in_the_end_is_none(wheel: Wheel, code: str) -> None:
    release = wheel("liger-kernel", "0.8.5")

    finding = examine(release, appended(code)(text_of(release, feature.MODULE)))

    assert finding.verdict is Verdict.UNRECOGNISED


STILL_BROKEN = CASES["liger-flce-none-backward"]


@pytest.mark.parametrize("edit", STILL_BROKEN.edits)
def test_a_repair_that_was_edited_is_not_recognised(edit: str) -> None:
    """`test_released_repairs.py` asks the same of every probe, and no more than that FIXED is not said."""
    assert STILL_BROKEN.ask(STILL_BROKEN.edited(STILL_BROKEN.edits[edit])).verdict is Verdict.UNRECOGNISED


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (KERNEL_MODULE, "lse_square_scale * lse * lse", "lse_square_scale * lse"),
        ("liger_kernel.ops.utils", "grad_output = tl.load(grad_output_ptr)", "grad_output = 1.0"),
        ("liger_kernel.backends.dispatch", "def dispatch(", "@patched\ndef dispatch("),
        (
            "liger_kernel.ops.backends._triton.cross_entropy",
            "def cross_entropy_loss",
            "@patched\ndef cross_entropy_loss",
        ),
    ],
)
def test_what_a_repair_goes_through_counts(wheel: Wheel, module: str, old: str, new: str) -> None:
    release = wheel("liger-kernel", "0.8.5")
    text = replaced(old, new)(text_of(release, module))

    class Other(Edited):
        def module(self, name: str) -> ModuleSource | None:
            found = super().module(name)
            return ModuleSource(name, found.path, text) if found is not None and name == module else found

    finding = ask(OVERLAY.probe, Other(release))

    assert finding.verdict is Verdict.UNRECOGNISED
    assert f"{module}:" in finding.summary()


@pytest.mark.parametrize("version", daily("0.8.2", "0.8.3", "0.8.4", "0.8.5"))
def test_a_repair_is_the_same_in_another_layout(wheel: Wheel, version: str) -> None:
    release = wheel("liger-kernel", version)

    finding = examine(release, ast.unparse(ast.parse(text_of(release, feature.MODULE))))

    assert (finding.verdict, finding.proof) == (Verdict.FIXED, Proof.READ)
    assert f"as in {version}" in finding.summary()
    assert Body(feature.MODULE, feature.FUNCTION) in finding.repair


@pytest.mark.parametrize("shape", OVERLAY.unsupported)
def test_a_shape_that_is_not_repaired_says_what_to_do_instead(shape: str) -> None:
    assert "0.8.2 or newer" in OVERLAY.unsupported[shape]
