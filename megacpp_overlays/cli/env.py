"""`megacpp-overlays env`: print the variables that arm Pythons of this environment, for an image, a shell or a pod."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping

from megacpp_overlays.cli.codes import ExitCode
from megacpp_overlays.cli.commands import Subparsers, add
from megacpp_overlays.loader.settings import SAID

_TEXT = (
    "Print the variables with which Pythons of this environment arm at their start, where `enable` cannot write a file: "
    "those of the start-up folder, and every setting of this package that is set here."
)
_MORE = """\
A job that sets PYTHONPATH itself, or starts Python with -I or -E, takes these back without a line; the file of `enable` it
cannot take back. In a pod, PYTHONPATH replaces that of the image.
"""
_EXAMPLES = (
    "env --sh > overlays.sh      # then: . overlays.sh",
    "env --docker > overlays.Dockerfile",
    "env --k8s      # for `env:` of a container",
)
_CODES = {ExitCode.CLEAN: "printed", ExitCode.NOT_CHECKED: "the package lies in a folder that PYTHONPATH cannot name"}
_PATH = "PYTHONPATH"


def add_to(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = add(commands, "env", _TEXT, examples=_EXAMPLES, codes=_CODES, more=_MORE)
    how = parser.add_mutually_exclusive_group(required=True)
    for name, text in _FORMS.items():
        how.add_argument(f"--{name}", dest="form", action="store_const", const=name, help=text)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> bool:
    """Print the variables.

    Raises:
        ChildrenError: PYTHONPATH cannot name the folder of this package.
    """
    from megacpp_overlays.processes import children  # noqa: PLC0415 - it brings multiprocessing

    values = {name: value for name, value in children.child_environment().items() if name != SAID}
    print(_RENDERED[arguments.form]({**values, _PATH: values[_PATH] if arguments.form == "k8s" else children.STARTUP}))
    return True


def _docker(values: Mapping[str, str]) -> str:
    quoted = {name: '"' + "".join(f"\\{c}" if c in '\\"$' else c for c in value) for name, value in values.items()}
    kept = {_PATH: '${PYTHONPATH:+:$PYTHONPATH}"'}
    return "ENV " + " \\\n    ".join(f"{name}={value}{kept.get(name, chr(34))}" for name, value in quoted.items())


def _sh(values: Mapping[str, str]) -> str:
    kept = {_PATH: '"${PYTHONPATH:+:$PYTHONPATH}"'}
    return "\n".join(f"export {name}={shlex.quote(value)}{kept.get(name, '')}" for name, value in values.items())


def _k8s(values: Mapping[str, str]) -> str:
    # In Kubernetes `$(NAME)` refers to another variable, and `$$` is a dollar; JSON is YAML.
    lines = [f"- name: {name}\n  value: {json.dumps(value.replace('$', '$$'))}" for name, value in values.items()]
    return "\n".join(lines)


_FORMS = {
    "docker": "an ENV instruction of a Dockerfile",
    "sh": "export lines of a shell; the entries of PYTHONPATH stay, behind the new one",
    "k8s": "entries of `env:` of a container in Kubernetes",
}
_RENDERED = {"docker": _docker, "sh": _sh, "k8s": _k8s}
