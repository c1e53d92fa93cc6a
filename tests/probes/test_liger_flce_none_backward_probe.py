"""The probe of pack 09: what it says about every release, and that it never repairs what it does not know."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from probing import ask
from repair_cases import CASES, appended

from megacpp_overlays.feature_probes import liger_flce_none_backward as feature
from megacpp_overlays.model import Body, Finding, Proof, Verdict
from megacpp_overlays.overlays.liger_flce_none_backward import OVERLAY
from megacpp_overlays.source.file_trees import ArchiveTree
from megacpp_overlays.source.trees import ModuleSource

Wheel = Callable[[str, str], Path]

NO_CHOICE = (Verdict.ABSENT, None)  # no argument `reduction`
SCALAR = (Verdict.BROKEN, feature.SCALAR_NONE)  # the argument only changes the normalisation; one number comes back
DETACHED = (Verdict.BROKEN, feature.DETACHED)  # per-token losses; a forward pass without gradients works
ANY_INPUT = (Verdict.BROKEN, feature.INPUT_NEEDS_GRADIENT)  # 0.6.3 leaves grad_weight unbound without them
WITH_BIAS = (Verdict.BROKEN, feature.BIAS_NEEDS_GRADIENT)  # 0.6.4 detaches a bias gradient that may be None
FIXED = (Verdict.FIXED, None)  # token_grad_output

RELEASES = {
    **dict.fromkeys(("0.1.0", "0.1.1", "0.2.0", "0.2.1"), NO_CHOICE),
    **dict.fromkeys(("0.3.0", "0.3.1", "0.4.0", "0.4.1", "0.4.2", "0.5.0", "0.5.1", "0.5.2"), SCALAR),
    **dict.fromkeys(("0.5.3", "0.5.4", "0.5.5", "0.5.6", "0.5.7", "0.5.8"), DETACHED),  # upstream 496
    **dict.fromkeys(("0.5.9", "0.5.10", "0.6.0", "0.6.1", "0.6.2"), SCALAR),  # upstream 680 took it out
    "0.6.3": ANY_INPUT,  # upstream 860 put it back
    **dict.fromkeys(("0.6.4", "0.6.5", "0.7.0"), WITH_BIAS),
    **dict.fromkeys(("0.8.0", "0.8.1"), DETACHED),
    **dict.fromkeys(("0.8.2", "0.8.3", "0.8.4", "0.8.5"), FIXED),  # upstream 1298
}
REPAIRABLE = [version for version, (_, shape) in RELEASES.items() if shape in OVERLAY.replacements]
DISTINCT = ["0.5.3", "0.6.3", "0.6.4", "0.6.5", "0.8.0", "0.8.1"]


class Edited:
    """A release in which the text of some modules is ours."""

    def __init__(self, wheel: Path, **texts: str) -> None:
        self._wheel = ArchiveTree(wheel)
        self._texts = texts

    def module(self, name: str) -> ModuleSource | None:
        source = self._wheel.module(name)
        text = self._texts.get(name.rsplit(".", 1)[-1])
        return source if text is None or source is None else ModuleSource(name, source.path, text)


@functools.cache
def text_of(wheel: Path, name: str) -> str:
    source = ArchiveTree(wheel).module(name)
    assert source is not None
    return source.text


def examine(wheel: Path, text: str) -> Finding:
    """Return what the loader makes of a release with another text of the target module."""
    return ask(OVERLAY.probe, Edited(wheel, fused_linear_cross_entropy=text))


def is_installable(finding: Finding) -> bool:
    return finding.verdict is Verdict.BROKEN and finding.shape in OVERLAY.replacements


@pytest.mark.parametrize("version", REPAIRABLE)
def test_the_evidence_names_the_releases_that_the_text_is_from(wheel: Wheel, version: str) -> None:
    finding = OVERLAY.probe(ArchiveTree(wheel("liger-kernel", version)))

    named = next(known for known in feature.KNOWN if f"as in {known.releases}" in finding.summary())
    assert named.shape == finding.shape


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


@pytest.mark.parametrize("version", DISTINCT)
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
    assert (finding.verdict, finding.shape) == RELEASES[version]


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
@pytest.mark.parametrize("version", DISTINCT)
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_a_changed_release_is_never_repaired(wheel: Wheel, version: str, edit: Callable[[str], str]) -> None:
    release = wheel("liger-kernel", version)

    finding = examine(release, edit(text_of(release, feature.MODULE)))

    assert not is_installable(finding), finding
    assert finding.verdict is not Verdict.FIXED, finding


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def renamed_parameters(text: str) -> Iterator[str]:
    for index, function in enumerate(functions(ast.parse(text))):
        for place in range(len(function.args.args)):
            tree = ast.parse(text)
            changed = list(functions(tree))[index]
            changed.args.args[place].arg += "_"
            yield ast.unparse(tree)


def inserted_parameters(text: str) -> Iterator[str]:
    for index, function in enumerate(functions(ast.parse(text))):
        for place in range(len(function.args.args) + 1):
            tree = ast.parse(text)
            arguments = list(functions(tree))[index].args
            arguments.args.insert(place, ast.arg("added"))
            if len(arguments.args) - place <= len(arguments.defaults):
                arguments.defaults.append(ast.Constant(None))
            yield ast.unparse(tree)


def deleted_statements(text: str) -> Iterator[str]:
    for place, node in enumerate(_bodies(ast.parse(text))):
        for index, statement in enumerate(node):
            if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
                tree = ast.parse(text)
                list(_bodies(tree))[place][index] = ast.Pass()
                yield ast.unparse(tree)


def _bodies(tree: ast.Module) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            yield body


@pytest.mark.unmeasured
@pytest.mark.parametrize("version", ["0.6.3", "0.8.1"])
@pytest.mark.parametrize("mutate", [renamed_parameters, inserted_parameters, deleted_statements])
def test_no_single_change_of_a_parameter_or_statement_is_repaired(
    wheel: Wheel, version: str, mutate: Callable[[str], Iterator[str]]
) -> None:
    release = wheel("liger-kernel", version)
    mutants = list(mutate(text_of(release, feature.MODULE)))

    repaired = [mutant for mutant in mutants if is_installable(examine(release, mutant))]

    assert len(mutants) > 30
    assert not repaired, repaired[0]


CONSTANTS_AND_NAMES = st.integers(min_value=0, max_value=100_000)


@pytest.mark.unmeasured
@given(version=st.sampled_from(DISTINCT), place=CONSTANTS_AND_NAMES)
def test_no_single_change_of_a_name_or_constant_is_repaired(wheel: Wheel, version: str, place: int) -> None:
    release = wheel("liger-kernel", version)
    tree = ast.parse(without_docstrings(text_of(release, feature.MODULE)))
    leaves = [node for node in ast.walk(tree) if isinstance(node, ast.Name | ast.Constant | ast.Attribute)]

    match leaves[place % len(leaves)]:
        case ast.Name() as name:
            name.id += "_"
        case ast.Attribute() as attribute:
            attribute.attr += "_"
        case ast.Constant() as constant:
            constant.value = f"not {constant.value}"

    assert not is_installable(examine(release, ast.unparse(tree)))


@pytest.mark.parametrize("version", DISTINCT)
def test_a_release_whose_kernel_computes_another_loss_is_not_repaired(wheel: Wheel, version: str) -> None:
    release = wheel("liger-kernel", version)
    kernel = text_of(release, feature.KERNEL_MODULE)
    changed = kernel.replace("z_loss = lse_square_scale * lse * lse", "z_loss = lse_square_scale * lse")

    finding = ask(OVERLAY.probe, Edited(release, cross_entropy=changed))

    assert changed != kernel
    assert finding.verdict is Verdict.UNRECOGNISED
    assert feature.KERNEL in finding.summary()


@pytest.mark.parametrize(
    "tail", ["LOG2_E = 1.0", "def tanh(x):\n    return x", "liger_cross_entropy_kernel = other", "import other as tl"]
)
def test_what_the_kernel_reads_beside_itself_counts(wheel: Wheel, tail: str) -> None:
    release = wheel("liger-kernel", "0.8.1")
    changed = f"{text_of(release, feature.KERNEL_MODULE)}\n{tail}\n"

    finding = ask(OVERLAY.probe, Edited(release, cross_entropy=changed))

    assert finding.verdict is Verdict.UNRECOGNISED


def test_the_parts_of_two_releases_together_are_not_a_release(wheel: Wheel) -> None:
    older, newer = wheel("liger-kernel", "0.8.0"), wheel("liger-kernel", "0.8.1")

    finding = ask(OVERLAY.probe, Edited(newer, cross_entropy=text_of(older, feature.KERNEL_MODULE)))

    assert finding.verdict is Verdict.UNRECOGNISED
    assert "mixture" in finding.summary()


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (replaced("grad_logits_chunk * token_grad_output", "grad_logits_chunk * 1 #"), "not applied"),
        (replaced("token_grad_output=grad_output", "token_grad_output=None"), "not handed over"),
    ],
    ids=["not applied", "not handed over"],
)
def test_the_argument_alone_is_not_the_fix(wheel: Wheel, edit: Callable[[str], str], why: str) -> None:
    release = wheel("liger-kernel", "0.8.2")
    # The multiplication spans three lines; what is left of it is a call on a line of its own.
    text = ast.unparse(ast.parse(text_of(release, feature.MODULE)))

    finding = examine(release, edit(text))

    assert finding.verdict is Verdict.UNRECOGNISED
    assert why in finding.summary()


@pytest.mark.parametrize(
    "code",
    [
        f"{feature.FUNCTION} = older",
        f"{feature.FUNCTION}.backward = staticmethod(older)",
        f"for {feature.FUNCTION} in older: ...",
        f"from elsewhere import older as {feature.CORE_FORWARD}",
        f"def patch():\n    global {feature.CORE_FORWARD}\n    {feature.CORE_FORWARD} = older",
        f"globals().update({feature.CORE_BACKWARD}=older)",
    ],
)
def test_a_repair_whose_name_means_something_else_in_the_end_is_none(wheel: Wheel, code: str) -> None:
    release = wheel("liger-kernel", "0.8.5")

    finding = examine(release, appended(code)(text_of(release, feature.MODULE)))

    assert finding.verdict is Verdict.UNRECOGNISED
    assert "is bound elsewhere, too" in finding.summary()


STILL_BROKEN = CASES["liger"]


@pytest.mark.parametrize("edit", STILL_BROKEN.edits)
def test_a_repair_that_was_edited_is_not_recognised(edit: str) -> None:
    """`test_repairs.py` asks the same of every probe, and no more than that FIXED is not said."""
    assert STILL_BROKEN.ask(STILL_BROKEN.edited(STILL_BROKEN.edits[edit])).verdict is Verdict.UNRECOGNISED


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (feature.KERNEL_MODULE, "lse_square_scale * lse * lse", "lse_square_scale * lse"),
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
    assert finding.looks_repaired
    assert f"not as in a tree that was read: {module}:" in finding.summary()


@pytest.mark.parametrize("version", ["0.8.2", "0.8.3", "0.8.4", "0.8.5"])
def test_a_repair_is_the_same_in_another_layout(wheel: Wheel, version: str) -> None:
    release = wheel("liger-kernel", version)

    finding = examine(release, ast.unparse(ast.parse(text_of(release, feature.MODULE))))

    assert (finding.verdict, finding.proof) == (Verdict.FIXED, Proof.READ)
    assert f"as in {version}" in finding.summary()
    assert Body(feature.MODULE, feature.FUNCTION) in finding.repair


def test_what_only_looks_repaired_says_so_and_names_what_would_have_to_be_read(wheel: Wheel) -> None:
    release = wheel("liger-kernel", "0.8.5")

    finding = examine(release, appended("EXTRA = 1")(text_of(release, feature.MODULE)))

    assert (finding.verdict, finding.looks_repaired) == (Verdict.UNRECOGNISED, True)
    assert Body(feature.MODULE, feature.CORE_FORWARD) in finding.repair


FAIL_CLOSED = """
import torch


def fused_linear_cross_entropy_forward(x, reduction="mean"):
    loss_1d = x.sum(dim=-1)
    if reduction == "none":
        loss = loss_1d
    else:
        loss = torch.sum(loss_1d)
    return loss


def fused_linear_cross_entropy_backward(grad_output, grad_input):
    assert grad_output.ndim == 0, "one number only"
    return grad_input * grad_output


class LigerFusedLinearCrossEntropyFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, reduction="mean"):
        return fused_linear_cross_entropy_forward(x, reduction)

    @staticmethod
    def backward(ctx, grad_output):
        return fused_linear_cross_entropy_backward(grad_output, *ctx.saved_tensors), None
"""


def test_a_build_that_refuses_per_token_gradients_is_named_as_such(wheel: Wheel) -> None:
    """Upstream pull request 1126 proposes this form."""
    finding = examine(wheel("liger-kernel", "0.8.1"), FAIL_CLOSED)

    assert (finding.verdict, finding.shape) == (Verdict.BROKEN, feature.REJECTED)
    assert feature.REJECTED in OVERLAY.unsupported


@pytest.mark.parametrize("shape", OVERLAY.unsupported)
def test_a_shape_that_is_not_repaired_says_what_to_do_instead(shape: str) -> None:
    assert "0.8.2 or newer" in OVERLAY.unsupported[shape]
