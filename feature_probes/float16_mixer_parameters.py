"""Marks on the parameters that the Mamba mixers of Megatron create in fp32 "to keep" them there.

`MambaMixer` creates `A_log` and `D` in fp32 in every release and tree read: 0.13.0 to 0.19.2, main and dev. The gated
delta product, on main only, does so with `A_log`. Nothing marks them, so `Float16Module` casts them with everything
else. The gated delta net is left out: it creates `A_log` and `dt_bias` in `params_dtype`, so there are no bits to keep.

Three things are read, and every mention of these parameters in a mixer must be a known one, so that one who turns this
on is not the first to run the code behind a new one:

    creation   in fp32, and not conditional: the constructor has no way out before its end, as the seam counts on both
    reading    cast where dtypes meet: `.float()`, `.to(dtype)`, or the argument `D` of a kernel that loads it as fp32
    marking    none is unmarked; all of them looks repaired; a mark under a condition is not recognised

Whether anything honours marks is the matter of `float16-fp32-exemption`; where its probe recognises nothing, neither
does this one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from megacpp_overlays.errors import SourceError
from megacpp_overlays.feature_probes import float16_fp32_exemption
from megacpp_overlays.feature_probes.definitions import called, plain_function, ways_out
from megacpp_overlays.feature_probes.findings import absent, at, broken, finding_of, unknown, unrecognised
from megacpp_overlays.feature_probes.repairs import Repairs, judged
from megacpp_overlays.fp32_marks import MARK
from megacpp_overlays.frozen import NamedTuple
from megacpp_overlays.model import Evidence, Finding, Target, Verdict
from megacpp_overlays.source.fingerprint import fingerprint
from megacpp_overlays.source.trees import FunctionNode, ModuleSource, SourceTree

UNMARKED = "unmarked-fp32-parameters"

_REPAIRED: Repairs = {}
"""No mixer that marks its parameters was read yet."""

_SSM = "megatron.core.ssm"
_MARKER = "mark_keep_in_fp32"
_CURRENT = "device=torch.cuda.current_device()"
_EMPTY = f"torch.empty(self.nheads_local_tp, dtype=torch.float32, {_CURRENT})"
_INITIALISED = {
    (f"A = {_EMPTY}.uniform_(*A_init_range)",),
    (f"A = {_EMPTY}", "A = A.uniform_(*A_init_range)"),
}
"""How the values behind `A_log` come about: until 0.15.3, and since 0.16.0."""
_VALUES = {
    "A_log": "nn.Parameter(A_log)",
    "D": f"nn.Parameter(torch.ones(self.d_inner_local_tp if self.D_has_hdim else self.nheads_local_tp, {_CURRENT}))",
}
_D = "D=rearrange(self.cp.get_D().float(), '(h p) -> h p', p=self.headdim) if self.D_has_hdim else self.cp.get_D()"
_KERNELS = (
    "mamba_split_conv1d_scan_combined",
    "mamba_chunk_scan_combined",
    "mamba_chunk_scan_combined_varlen",
)
"""Kernels of mamba-ssm and Megatron that take `D` of any dtype: they load it as fp32 and return its gradient in its own
dtype (mamba-ssm 2.3.2.post1, megatron-core 0.19.2)."""
_MAMBA_READS = {
    "A = -torch.exp(self.cp.get_A_log().float())",
    "A = -torch.exp(self.A_log.float())",
    "base = -torch.exp(self.A_log.float())",
    "self._A_neg_exp_cache.copy_(-torch.exp(self.A_log.float()))",
    "D = repeat(self.D, 'h -> (h p)', p=self.headdim)",
    "D = repeat(self.D, 'h -> h p', p=self.headdim)",
    "y = y + rearrange(self.D.to(dtype), 'h -> h 1') * x",
    *(f"{kernel}({_D})" for kernel in _KERNELS),
}


class Mixer(NamedTuple):
    """A mixer, and what is known about its parameters."""

    target: Target
    parameters: tuple[str, ...]
    """Those that it creates in fp32."""
    reads: frozenset[str]
    """Statements and arguments that read them."""
    parallel: str
    """The class that slices them for context parallelism, in the module of the second name."""
    parallel_module: str
    slicing: str
    """Fingerprint of its `_slice_vector_param`."""

    @property
    def class_name(self) -> str:
        """Return the name of the mixer's class."""
        return self.target.symbol.partition(".")[0]


MAMBA = Mixer(
    target=Target("megatron-core", f"{_SSM}.mamba_mixer", "MambaMixer.__init__"),
    parameters=("A_log", "D"),
    reads=frozenset(_MAMBA_READS),
    parallel="MambaContextParallel",
    parallel_module=f"{_SSM}.mamba_context_parallel",
    slicing="524f350a763f85e7",
)
GATED_DELTA_PRODUCT = Mixer(
    target=Target("megatron-core", f"{_SSM}.gated_delta_product", "GatedDeltaProductMixer.__init__"),
    parameters=("A_log",),
    reads=frozenset(
        {
            "g = -self.cp.get_A_log().float().exp() * F.softplus(a.float() + self.cp.get_dt_bias())",
            "self.D = None",
        }
    ),
    parallel="GDPContextParallel",
    parallel_module=f"{_SSM}.gdp_context_parallel",
    slicing="3eb8a6ee95f10171",
)


def probe_mamba(tree: SourceTree) -> Finding:
    """Return whether `MambaMixer` marks `A_log` and `D`."""
    return _probe(tree, MAMBA)


def probe_gated_delta_product(tree: SourceTree) -> Finding:
    """Return whether `GatedDeltaProductMixer` marks `A_log`."""
    return _probe(tree, GATED_DELTA_PRODUCT)


def _probe(tree: SourceTree, mixer: Mixer) -> Finding:
    source = tree.module(mixer.target.module)
    if source is None:
        return absent(f"there is no module {mixer.target.module}")
    init = plain_function(source, mixer.target.symbol)
    if init is None and source.find(mixer.class_name) is None and mixer.class_name not in source.text:
        return absent(f"{source.name} defines no {mixer.class_name}")
    if init is None:
        raise unknown(source, source.syntax, f"{mixer.target.symbol} is not defined here")
    marked = _read_mixer(source, init, mixer)
    _check_slices(tree, mixer)
    cast = finding_of(float16_fp32_exemption.probe, tree)
    if cast.verdict not in {Verdict.BROKEN, Verdict.FIXED} and not cast.looks_repaired:
        return unrecognised(Evidence(seen="nothing that is known would honour the marks"), *cast.evidence)
    missing = [name for name in mixer.parameters if name not in marked]
    if not missing:
        marks = at(source, init, f"{mixer.class_name} marks {' and '.join(mixer.parameters)}")
        places = (f"{source.name}:{mixer.class_name}", f"{mixer.parallel_module}:{mixer.parallel}._slice_vector_param")
        return judged(tree, _REPAIRED, marks, places=places)
    seen = f"{mixer.class_name} creates {' and '.join(mixer.parameters)} in fp32 and does not mark {', '.join(missing)}"
    return broken(UNMARKED, at(source, init, seen))


def _read_mixer(source: ModuleSource, init: FunctionNode, mixer: Mixer) -> set[str]:
    """Return the parameters that are marked.

    Raises:
        SourceError: a parameter is created in another way, or not always, or mentioned where no known version does.
    """
    for left in ways_out(init):
        raise unknown(source, left, f"{mixer.target.symbol} may end before it has created everything")
    created: list[str] = []
    marked: set[str] = set()
    for mention in _mentions(source, {"A_log", "D", "get_A_log", "get_D"}):
        name, value = mention.name, _VALUES.get(mention.name)
        creates = {f"self.{name} = {value}", f"self.{name} = {_MARKER}({value})"}
        marks = {f"self.{name} = {_MARKER}({value})", f"self.{name}.{MARK} = True", f"{_MARKER}(self.{name})"}
        if mention.text in creates | marks and mention.always and mention.function is init:
            created += [name] if mention.text in creates else []
            marked |= {name} if mention.text in marks else set()
        elif mention.text not in _settings(name) | mixer.reads | {f"{mixer.parallel}({name}_cp1=self.{name})"}:
            raise unknown(source, mention.node, f"unknown: {mention.text}")
    if sorted(created) != sorted(mixer.parameters):
        raise unknown(source, init, f"{mixer.class_name} creates {', '.join(created) or 'none'} in a known way")
    _check_values(source, init)
    return marked


def _settings(name: str) -> set[str]:
    """Return what else is done with a new parameter."""
    return {
        f"self.{name}._no_weight_decay = True",
        f"setattr(self.{name}, 'tensor_model_parallel', True)",
        f"setattr(self.{name}, 'partition_dim', 0)",
    }


def _check_values(source: ModuleSource, init: FunctionNode) -> None:
    """Check that the local variables behind `A_log` are fp32, by everything that binds them."""
    bound: dict[str, list[str]] = {"A": [], "A_log": []}
    for node in ast.walk(init):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            bound.get(node.targets[0].id, []).append(ast.unparse(node))
    stores = sum(
        isinstance(node, ast.Name) and node.id in bound and not isinstance(node.ctx, ast.Load)
        for node in ast.walk(init)
    )
    known = tuple(bound["A"]) in _INITIALISED and bound["A_log"] == ["A_log = torch.log(A)"]
    if not known or stores != sum(map(len, bound.values())):
        raise unknown(source, init, "the values of A_log come about in another way")


def _check_slices(tree: SourceTree, mixer: Mixer) -> None:
    """Check that the parameters are held and sliced by context parallelism as they are.

    Raises:
        SourceError: they are not, or not in the one way that is known.
    """
    source = tree.module(mixer.parallel_module)
    function = plain_function(source, f"{mixer.parallel}._slice_vector_param") if source else None
    if source is None or function is None:
        raise SourceError(f"there is no {mixer.parallel_module}.{mixer.parallel}._slice_vector_param")
    if (body := fingerprint(function)) != mixer.slicing:
        raise unknown(source, function, f"{mixer.parallel}._slice_vector_param has an unknown body {body}")
    known = {f"self.{name}_cp1 = {name}_cp1" for name in ("A_log", "D")} | {
        "return self._slice_vector_param(self.A_log_cp1)",
        "return self._slice_vector_param(self.D_cp1, has_hdim=self.D_has_hdim)",
    }
    for mention in _mentions(source, {"A_log_cp1", "D_cp1"}):
        if mention.text not in known:
            raise unknown(source, mention.node, f"unknown: {mention.text}")


class _Mention(NamedTuple):
    """One place where an attribute is mentioned."""

    name: str
    """The parameter: `A_log` or `D`, also for what returns a slice of it."""
    text: str
    """The statement, or `function(argument=...)` where it is in a named argument."""
    node: ast.AST
    function: FunctionNode | None
    always: bool
    """Whether nothing but `with` stands between the function and the statement."""


def _mentions(source: ModuleSource, names: set[str]) -> Iterator[_Mention]:
    """Yield where attributes are mentioned, and their names as text outside `sharded_state_dict`."""
    parents = {child: node for node in ast.walk(source.syntax) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(source.syntax):
        match node:
            case ast.Attribute(attr=name) if name in names:
                pass
            case ast.Constant(value=str() as name) if name in names:
                pass
            case _:
                continue
        place: ast.AST = node
        while not isinstance(place, ast.stmt | ast.keyword):
            place = parents[place]
        above: list[ast.AST] = [place]
        while above[-1] in parents:
            above.append(parents[above[-1]])
        function = next((each for each in above if isinstance(each, ast.FunctionDef)), None)
        if isinstance(node, ast.Constant) and getattr(function, "name", None) == "sharded_state_dict":
            continue
        call = parents[place]
        text = ast.unparse(place)
        if isinstance(place, ast.keyword) and isinstance(call, ast.Call):
            text = f"{called(call)}({text})"
        between = above[1 : above.index(function)] if function else []
        yield _Mention(
            name=name.removeprefix("get_").removesuffix("_cp1"),
            text=text,
            node=node,
            function=function,
            always=function is not None and all(isinstance(each, ast.With) for each in between),
        )
