"""Probe the source from which `MambaMixer` gets the document of each token of a packed row, which may be missing.

The convolution and the scan begin anew where `seq_idx`, one number for each token, changes. Without it the conv and SSM
state of one document runs into the next.

    0.16.0, 0.16.1        the mixer derives it from `cu_seqlens` and the gathered length: FIXED
    0.17.0 and newer      the mixer takes `packed_seq_params.seq_idx`, which `PackedSeqParams` fills in only where its caller
                          gave `total_tokens`; else it is None, and nothing is said: BROKEN. Main and dev too
    up to 0.15.3          the mixer takes no packed rows: ABSENT

The seam surrounds `_ssm_training` and relies on what it is given: activations of the gathered length first, and the
caller's parameters. So `forward` must hand over both as every known one does, in a class of no other bases, and
`_ssm_training` and `PackedSeqParams.__post_init__` must be ones that were read.

Source: https://github.com/NVIDIA/Megatron-LM/pull/3373 (derived in `PackedSeqParams` since).
"""

from __future__ import annotations

import ast

from megacpp_overlays.feature_probes import packed_params
from megacpp_overlays.feature_probes.definitions import calls, plain_class, plain_function, words
from megacpp_overlays.feature_probes.findings import absent, at, broken, unknown
from megacpp_overlays.feature_probes.repairs import judged, table
from megacpp_overlays.model import Evidence, Finding, Target
from megacpp_overlays.source.fingerprint import fingerprint
from megacpp_overlays.source.patterns import Pattern
from megacpp_overlays.source.trees import FunctionNode, ModuleSource, SourceTree

_CLASS = "MambaMixer"
METHOD = f"{_CLASS}._ssm_training"
TARGET = Target(distribution="megatron-core", module="megatron.core.ssm.mamba_mixer", symbol=METHOD)
FROM_CALLER = "seq-idx-from-caller"

_TRAINING = {
    "db98305fbae4abc9": "0.17.0 to 0.18.2",
    "84449f588e80de3c": "main of 2026-06-01 and dev of 2026-06-06",
    "dc7b1ab3e426dabd": "0.19.0 to 0.19.2, main and dev",
}
"""Fingerprints of `_ssm_training` that take `seq_idx` as it comes."""
_POST_INIT = {
    "8da9fd27184fc0ff": "main and dev of 2026-03-11",
    "38633146633a6c92": "0.17.0 to 0.19.2, main and dev",
}
"""Fingerprints of `PackedSeqParams.__post_init__` that derive it only where `total_tokens` was given."""
_BASES = (["MegatronModule"], ["SSMDynamicInferenceMixin", "MegatronModule"])
"""Of the mixer, until 0.19.2 and on main since 2026-08-22. The other one adds what inference needs."""

_FORWARD, _DERIVED = f"{_CLASS}.forward", f"{_CLASS}._create_packed_seq_idx"
_PLACES = (
    *(f"{TARGET.module}:{symbol}" for symbol in (_FORWARD, METHOD, _DERIVED)),
    f"{packed_params.MODULE}:{packed_params.NAME}",
)
_REPAIRED = table(_PLACES, {"0.16.0 and 0.16.1": "65c0427b81497888 e88cc6da350e090c 417ba24f85174b66 725a49d169fe3985"})

_TAKES = Pattern("seq_idx = packed_seq_params.seq_idx")
_GATHERS = Pattern("zxBCdt = self.cp.pre_conv_ssm(zxBCdt, packed_seq_params)")
_TRAINS = Pattern("y = self._ssm_training(zxBCdt, packed_seq_params)")


def probe(tree: SourceTree) -> Finding:
    """Return whether a packed row without `total_tokens` reaches the scan without `seq_idx`."""
    source = tree.module(TARGET.module)
    if source is None:
        return absent(f"there is no module {TARGET.module}")
    training = plain_function(source, METHOD)
    if training is None:
        return _without_training(source)
    body = fingerprint(training)
    takes = next(_TAKES.find(training), None)
    if body not in _TRAINING:
        if takes is None and _derives(training):
            seen = at(source, training, f"{METHOD} derives seq_idx itself")
            return judged(tree, _REPAIRED, seen, places=_PLACES)
        raise unknown(source, training, f"{METHOD} has an unknown body {body}")
    if (elsewhere := _check_forward(source)) is not None:
        return judged(tree, _REPAIRED, elsewhere, places=_PLACES)
    params = tree.module(packed_params.MODULE)
    if params is None:
        raise unknown(source, training, f"there is no module {packed_params.MODULE}")
    post_init, known = _post_init(params)
    if known is None:
        if "total_tokens" not in words(post_init):
            seen = at(params, post_init, f"{packed_params.NAME} fills in seq_idx without total_tokens")
            return judged(tree, _REPAIRED, seen, places=_PLACES)
        raise unknown(
            params, post_init, f"{packed_params.NAME}.__post_init__ has an unknown body {fingerprint(post_init)}"
        )
    return broken(
        FROM_CALLER,
        at(source, takes.node if takes else training, f"{METHOD} takes seq_idx as it comes"),
        at(params, post_init, f"{packed_params.NAME} has none unless its caller gives total_tokens"),
        Evidence(seen=f"as in {_TRAINING[body]}"),
    )


def _without_training(source: ModuleSource) -> Finding:
    """Return ABSENT only where the mixer takes no packed rows: what moved or got another name is not gone."""
    cls = source.find(_CLASS)
    if cls is None and _CLASS not in source.text:
        return absent(f"{source.name} defines no {_CLASS}")
    if isinstance(cls, ast.ClassDef) and not any("packed_seq" in word for word in words(source.syntax)):
        forward = plain_function(source, _FORWARD)
        if forward is not None and forward.args.kwarg is None:
            return absent(f"{_FORWARD} takes no packed rows", source)
    raise unknown(source, cls, f"{METHOD} is not defined here")


def _derives(training: FunctionNode) -> bool:
    """Return whether `seq_idx` comes from a call that is given the packed parameters."""
    return any(
        isinstance(node, ast.Assign)
        and [ast.unparse(target) for target in node.targets] == ["seq_idx"]
        and any("packed_seq_params" in words(call) for call in calls(node.value))
        for node in ast.walk(training)
    )


def _check_forward(source: ModuleSource) -> Evidence | None:
    """Check that `_ssm_training` gets the gathered activations and the parameters of the caller.

    Returns:
        What looks as if `forward` derived `seq_idx` before it hands them over, None if nothing does.

    Raises:
        SourceError: it may get something else.
    """
    cls = plain_class(source, _CLASS)
    if cls is None or [ast.unparse(base) for base in cls.bases] not in _BASES or cls.keywords:
        raise unknown(source, cls, f"{_CLASS} has other bases")
    if source.bindings.changes(_CLASS):
        raise unknown(source, cls, f"{_CLASS} is changed outside its methods")
    forward = plain_function(source, _FORWARD)
    if forward is None:
        raise unknown(source, cls, f"{_CLASS} has no forward")
    gathers, trains = list(_GATHERS.find(forward)), list(_TRAINS.find(forward))
    if len(gathers) != 1 or len(trains) != 1 or len(calls(forward, "_ssm_training")) != 1:
        raise unknown(source, forward, f"{_FORWARD} does not hand gathered activations to _ssm_training once")
    stored = [node for node in ast.walk(forward) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)]
    given = [node for node in stored if node.id == "packed_seq_params"]
    if given or "seq_idx" in words(forward):
        return at(source, given[0] if given else forward, f"{_FORWARD} changes the parameters that it hands on")
    behind = getattr(gathers[0].node, "end_lineno", 0)
    if late := [node for node in stored if node.id == "zxBCdt" and node.lineno > behind]:
        raise unknown(source, late[0], f"{_FORWARD} changes the gathered activations")
    return None


def _post_init(params: ModuleSource) -> tuple[FunctionNode, str | None]:
    """Return what runs behind the constructor, and where it was read.

    Raises:
        SourceError: the class is no plain data class with that method and a `seq_idx` that is None unless it is given.
    """
    cls = packed_params.data_class(
        params, optional=("total_tokens", "cu_seqlens_q", "cu_seqlens_q_padded"), filled=("seq_idx",)
    )
    post_init = params.function(f"{packed_params.NAME}.__post_init__")
    if post_init is None or post_init not in cls.body:
        raise unknown(params, cls, f"{packed_params.NAME} has no plain __post_init__")
    return post_init, _POST_INIT.get(fingerprint(post_init))
