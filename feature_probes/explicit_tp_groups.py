"""Probe modules of Megatron that were given tensor parallel groups for calls that do not pass them on.

A helper that is given no group takes the default one of the process. Where a model was built with other groups, ranks that have
nothing to do with each other then exchange values. Nothing raises where both groups have as many ranks.

    up to 0.12.3            nothing takes groups: ABSENT
    0.13.0 to 0.19.2, main  projections of a cross attention, and what blocks save to recompute: BROKEN
    0.13.0 to 0.15.3        all of a multi-latent attention: BROKEN
    0.16.0 to 0.19.2, main  latents that are cut by columns: BROKEN
    0.14.0 to 0.19.2, main  combined embeddings of LLaVA: BROKEN
    0.17, 0.19, main        what a prediction layer saves to recompute: BROKEN. Up to 0.16.1 the layer has no group of its own,
                            and in 0.18 recomputing one ends in an error: ABSENT

No tree has a repair. A seam names the group for as long as upstream's method runs, so that method must be one that was read, and
so must be the helpers that it calls.

Source: https://github.com/NVIDIA/Megatron-LM/issues/7452
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Mapping

from megacpp_overlays.errors import SourceError
from megacpp_overlays.feature_probes.definitions import called, calls, plain_class, plain_function, words
from megacpp_overlays.feature_probes.findings import absent, at, broken, unknown
from megacpp_overlays.feature_probes.known_bodies import check_imported, check_known
from megacpp_overlays.feature_probes.mla_rope_key_gradient import CONSTRUCTORS, DOWN_PROJECTIONS
from megacpp_overlays.feature_probes.repairs import Repairs, judged
from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source.fingerprint import fingerprint
from megacpp_overlays.source.trees import SourceTree

FORWARD = "MultiLatentAttention.forward"
HELPER = "get_tensor_model_parallel_group_if_none"
UNTOLD = "default-group-for-whoever-asks"
PROJECTIONS = "projections-of-the-default-group"
LATENTS = "latents-over-the-default-group"
ATTENTION = "attention-of-the-default-group"
EMBEDDINGS = "embeddings-over-the-default-group"
SAVED = "saved-over-the-default-group"
STACK = "layers-saved-over-the-default-group"
PIECES = "pieces-of-the-default-group"

_MAPPINGS = "megatron.core.tensor_parallel.mappings"
_PIECES = "megatron.core.tensor_parallel.utils"
_HELPERS = {
    _MAPPINGS: {
        "gather_from_tensor_model_parallel_region": {"f0a82b6ce7dcf68a"},
        "scatter_to_sequence_parallel_region": {"737ce961f85c3469"},
    },
    _PIECES: {
        "split_tensor_into_1d_equal_chunks": {"a4fef7871e9e862c"},
        "gather_split_1d_tensor": {"df2d2a1bbfdeb98e"},
    },
}
"""What asks for the default group where it is given none, since 0.13.0."""
_ASKED = {"9486fbb90ec90dc0", "41918597c8eb713a"}
"""What answers it: 0.13 to 0.15, and since 0.16.0."""
_GIVEN = {"pg_collection", "model_comm_pgs", "tp_group"}
"""Names of groups that a class is given."""
_PASSED = {"group", "tp_group"}
"""Names under which a repair would hand them on."""


def _target(module: str, symbol: str) -> Target:
    return Target(distribution="megatron-core", module=f"megatron.core.{module}", symbol=symbol)


@dataclasses.dataclass(frozen=True)
class Caller:
    """A function that hands work on without a group, and what has to be as it was read around it."""

    target: Target
    bodies: Mapping[str, tuple[str | None, str]]
    """Shapes by fingerprint, with the trees that have them; None where recomputing ends in an error anyway."""
    seen: str
    works: frozenset[str]
    """What it calls without a group."""
    helpers: str | None = None
    """Module of the helpers."""
    is_importing: bool = True
    """Whether the module imports them by name."""
    beside: Mapping[str, set[str]] = dataclasses.field(default_factory=dict)
    """Other functions of the module that must have been read, where there are any."""
    none: tuple[str, ...] = ()
    """What must be inherited."""
    own: str | None = None
    """Attribute without which the class has no group to hand on."""


_FORWARDS = {
    *(
        "ad1acea880d25ba4",
        "6f48dda14fcfc1e6",
        "1cf99d97e075f2df",
        "c9aa76dec1e7da3d",
    ),  # 0.13, 0.14, 0.15, 0.16 and 0.17
    *("791bbee2b3a64b7d", "23fe9983cacf095d", "7c8d198080137807"),  # 0.18, 0.19 and main d98e8a64dd
}
_LATENT_CONSTRUCTORS = {
    "MLASelfAttention.__init__": CONSTRUCTORS["MLASelfAttention.__init__"] | {"380059f5ab6d3e8e"},  # 0.13
    "MultiLatentAttention.__init__": CONSTRUCTORS["MultiLatentAttention.__init__"] | {"039d6b0b5438da15"},
}
DEFAULT = _target("utils", HELPER)
CROSS = Caller(
    _target("transformer.attention", "CrossAttention.__init__"),
    {
        "8776eba4cb23c7b8": (PROJECTIONS, "0.13.0 to 0.14.0"),
        "df0152cc3c848db6": (PROJECTIONS, "0.15.0 to 0.15.3"),
        "ec7152e9b8e9dc43": (PROJECTIONS, "0.16.0 to 0.17.1"),
        "ae73ce112bad9f89": (PROJECTIONS, "0.18.0 to 0.19.2 and main d98e8a64dd"),
    },
    "projections of queries, keys and values are built without the attention's group",
    frozenset({"linear_q", "linear_kv", "build_module"}),
)
LATENT = Caller(
    _target("transformer.multi_latent_attention", "MLASelfAttention.get_query_key_value_tensors"),
    {
        "778d859ec60203a4": (ATTENTION, "0.13.0 and 0.13.1"),
        "09396731362fcfd2": (ATTENTION, "0.14.0"),
        "ca27e2345961e8d6": (ATTENTION, "0.15.0 to 0.15.3"),
        "df5ec5bf3e1566f9": (LATENTS, "0.16.0 and 0.16.1"),
        "d6dd18bf30977648": (LATENTS, "0.17.0 and 0.17.1"),
        "141f94c3cb9d5cfa": (LATENTS, "0.18.0 to 0.18.2"),
        "013c26bc6e8ad8e6": (LATENTS, "0.19.0 to 0.19.2"),
        "43b3cf6e32c2bb05": (LATENTS, "main d98e8a64dd"),
    },
    "latents that are cut by columns are gathered without the attention's group",
    frozenset(_HELPERS[_MAPPINGS]),
    helpers=_MAPPINGS,
    beside={**DOWN_PROJECTIONS, FORWARD: _FORWARDS, **_LATENT_CONSTRUCTORS},
    none=(
        "MLASelfAttention.forward",
        "FusedMLASelfAttention.forward",
        "FusedMLASelfAttention.get_query_key_value_tensors",
    ),
)
LLAVA = Caller(
    _target("models.multimodal.llava_model", "LLaVAModel._process_embedding_token_parallel"),
    {
        "c0ddc50bcb40e9c5": (EMBEDDINGS, "0.14.0 to 0.16.1"),
        "74c90c534bfbcbe2": (EMBEDDINGS, "0.17.0 and 0.17.1"),
        "ea49261b7085da5a": (EMBEDDINGS, "0.18.0 to 0.19.2"),
        "e0c9081b64c8f012": (EMBEDDINGS, "main d98e8a64dd"),
    },
    "combined embeddings are cut into parts of the sequence without the model's group",
    frozenset({"scatter_to_sequence_parallel_region"}),
    helpers=_MAPPINGS,
    is_importing=False,  # it asks the package
)
PREDICTION = Caller(
    _target("transformer.multi_token_prediction", "MultiTokenPredictionLayer._checkpointed_forward"),
    {
        "a7de4746251f61a3": (SAVED, "0.14.0 to 0.17.1"),
        "25318b5a2b799373": (None, "0.18.0 to 0.18.2"),
        "f3b5fc59912df46a": (SAVED, "0.19.0 to 0.19.2 and main d98e8a64dd"),
    },
    "what is saved to recompute a prediction layer is shared out without its group",
    frozenset({"checkpoint"}),
    own="tp_group",
)
LAYERS = Caller(
    _target("recompute", "checkpointed_forward"),
    {
        "20c98fcec50296df": (STACK, "0.18.0 to 0.18.2"),
        "e3f81e5efe7e6bd4": (STACK, "0.19.0 to 0.19.2 and main d98e8a64dd"),
    },
    "what is saved to recompute layers is shared out without the group of their block",
    frozenset({"checkpoint"}),
)
OLD_LAYERS = Caller(
    _target("transformer.transformer_block", "TransformerBlock._checkpointed_forward"),
    {
        "e1506ed578f720cf": (STACK, "0.13.0 to 0.14.0"),
        "3f07f20233750b79": (STACK, "0.15.0 to 0.15.3"),
        "176dadb2a251610c": (STACK, "0.16.0 and 0.16.1"),
        "431af2689d67e358": (STACK, "0.17.0 and 0.17.1"),
    },
    LAYERS.seen,
    LAYERS.works,
)
CHECKPOINT = Caller(
    _target("tensor_parallel.random", "CheckpointFunction"),
    {
        "c1be4b3336b0893b": (PIECES, "0.13.0 to 0.15.3"),
        "2a83c9b1da5986cb": (PIECES, "0.16.0 and 0.16.1"),
        "0eb82f418a70aac6": (PIECES, "0.17.0 to 0.19.2"),
        "95258d51d462084c": (PIECES, "main d98e8a64dd"),
    },
    "what is saved to recompute is cut into pieces and gathered without a group",
    frozenset(_HELPERS[_PIECES]),
    helpers=_PIECES,
)
CALLERS = (CROSS, LATENT, LLAVA, PREDICTION, LAYERS, OLD_LAYERS, CHECKPOINT)
_WHERE = (
    f"{DEFAULT.module}:{HELPER}",
    f"{CROSS.target.module}:Attention.__init__",
    *(f"{each.target.module}:{each.target.symbol}" for each in CALLERS),
    *(f"{LATENT.target.module}:{symbol}" for symbol in DOWN_PROJECTIONS),
    *(f"{module}:{name}" for module, names in _HELPERS.items() for name in names),
)
"""Where a repair has to be read."""
_REPAIRED: Repairs = {}
"""No repair was merged yet."""


def probe(tree: SourceTree) -> Finding:
    """Return whether the helper is asked for a group by something that has one and cannot tell it."""
    source = tree.module(DEFAULT.module)
    function = plain_function(source, HELPER) if source else None
    if source is None or function is None:
        return absent(f"there is no {HELPER}", source)
    fingerprint(function)  # what cannot be read may be anything
    if not any(_may_hand_on(tree, each) for each in CALLERS):
        return absent("nothing hands work on without its group", source)
    check_known(source, HELPER, _ASKED)
    return broken(UNTOLD, at(source, function, "whoever gives no group is given the default one"))


def probe_cross(tree: SourceTree) -> Finding:
    """Return whether a cross attention builds projections without its group."""
    return _found(tree, CROSS)


def probe_latent(tree: SourceTree) -> Finding:
    """Return whether a multi-latent attention gathers latents without its group."""
    return _found(tree, LATENT)


def probe_llava(tree: SourceTree) -> Finding:
    """Return whether LLaVA shares embeddings out without its group."""
    return _found(tree, LLAVA)


def probe_prediction(tree: SourceTree) -> Finding:
    """Return whether a prediction layer shares out what it saves without its group."""
    return _found(tree, PREDICTION)


def probe_layers(tree: SourceTree) -> Finding:
    """Return whether a block shares out what it saves without its group, since 0.18.0."""
    return _found(tree, LAYERS)


def probe_old_layers(tree: SourceTree) -> Finding:
    """Return whether a block shares out what it saves without its group, up to 0.17.1."""
    return _found(tree, OLD_LAYERS)


def probe_checkpoint(tree: SourceTree) -> Finding:
    """Return whether what is saved is cut and gathered without a group."""
    return _found(tree, CHECKPOINT)


def _found(tree: SourceTree, caller: Caller) -> Finding:
    target, source = caller.target, tree.module(caller.target.module)
    if source is None:
        return absent(f"there is no {target.module}")
    owner, _, method = target.symbol.rpartition(".")
    is_class = not owner and target.symbol[0].isupper()
    cls = plain_class(source, owner) if owner else None
    node: ast.ClassDef | ast.FunctionDef | None = None
    if cls is not None or not owner:
        node = (plain_class if is_class else plain_function)(source, target.symbol)
    if node is None:
        return absent(f"there is no {target.symbol}", source)
    body = fingerprint(node)  # before anything is absent: what cannot be read may be anything
    helper = tree.module(DEFAULT.module)
    if helper is None or plain_function(helper, HELPER) is None:
        return absent("nothing takes groups", source)
    if cls is not None and not _GIVEN & words(cls):
        return absent(f"{owner} takes no groups", source)
    if body not in caller.bodies:
        if any(_is_told(each) for each in calls(node) if called(each) in caller.works):
            return judged(
                tree, _REPAIRED, at(source, node, f"{method or target.symbol} hands a group on"), places=_WHERE
            )
        raise unknown(source, node, f"nobody read {target.symbol} as it is: {body}")
    check_known(source, target.symbol, {body})
    shape, read_in = caller.bodies[body]
    if shape is None:
        return absent(f"{target.symbol} ends in an error, as in {read_in}", source)
    if caller.own is not None and caller.own not in _attributes(cls):
        return absent(f"{owner} has no {caller.own}, as in {read_in}", source)
    for symbol in caller.none:
        if own := source.bindings.of(symbol):
            raise unknown(source, own[0], f"{symbol} is not the one of its base")
    for symbol, known in caller.beside.items():
        if source.bindings.of(symbol):
            check_known(source, symbol, known)
    if caller.helpers is not None:
        _check_helpers(tree, caller.helpers)
        if caller.is_importing:
            check_imported(source, _HELPERS[caller.helpers], caller.helpers, f".{caller.helpers.rpartition('.')[2]}")
    return broken(shape, at(source, node, f"{caller.seen}, as in {read_in}"))


def _may_hand_on(tree: SourceTree, caller: Caller) -> bool:
    """Return whether something may call helpers without a group; how it does is what its own probe asks."""
    try:
        source = tree.module(caller.target.module)
        node = source.find(caller.target.symbol) if source else None
    except SourceError:
        return True
    return node is not None and any(called(each) in caller.works and not _is_told(each) for each in calls(node))


def _is_told(call: ast.Call) -> bool:
    """Return whether a call hands a group on."""
    return any(each.arg in _PASSED for each in call.keywords)


def _attributes(cls: ast.ClassDef | None) -> set[str]:
    return {each.attr for each in ast.walk(cls) if isinstance(each, ast.Attribute)} if cls else set()


def _check_helpers(tree: SourceTree, module: str) -> None:
    """Check that helpers ask for the default group as it was read.

    Raises:
        SourceError: something differs.
    """
    for name in (module, DEFAULT.module):
        source = tree.module(name)
        if source is None:
            raise SourceError(f"there is no {name}")
        for symbol, known in _HELPERS.get(name, {HELPER: _ASKED}).items():
            check_known(source, symbol, known)
