"""Start-up hook that arms a Python process before its first line, and then runs the `sitecustomize` behind it.

Python imports the first module of this name at start-up. This folder comes first on the PYTHONPATH of every child of
a process that asked for it, so any Python may find it here, of any environment and version: it must run on all since
3.6, and does nothing at all where it is not meant.

The start-up file of `megacpp-overlays enable` executes this file as well, under another name. It is found by the Pythons of its
environment alone, all of which are meant, and no `sitecustomize` waits behind it.
"""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_MEANT = "MEGACPP_OVERLAYS_CHILDREN"
_STARTUP_FILE = globals().get("STARTUP_FILE", "")
"""The `.pth` file that executes this; empty where PYTHONPATH led here."""


def _is_meant() -> bool:
    if _STARTUP_FILE:
        return True
    this = f"{sys.implementation.cache_tag}:{os.path.realpath(sys.prefix)}"  # the same as in loader/settings.py
    return os.environ.get(_MEANT, "").strip() == this


def _arm() -> None:
    """Import the copy of the package that this file belongs to, wherever the path leads."""
    if "megacpp_overlays" in sys.modules:  # a `.pth` file or another start-up hook was here first
        return
    import importlib.util  # noqa: PLC0415 - nothing is imported where nothing is meant

    package = os.path.dirname(os.path.dirname(_HERE))
    spec = importlib.util.spec_from_file_location(
        "megacpp_overlays", os.path.join(package, "__init__.py"), submodule_search_locations=[package]
    )
    assert spec is not None  # noqa: S101 - a `.py` file always has a spec and a loader
    assert spec.loader is not None  # noqa: S101
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    if _STARTUP_FILE:
        vars(module)["_startup_file"] = _STARTUP_FILE
    spec.loader.exec_module(module)


def _stop(error: BaseException) -> None:
    """End this process: `site` would swallow the error, and the launcher would run without overlays in silence."""
    import traceback  # noqa: PLC0415

    is_setting = type(error).__name__ == "SettingsError"
    if not type(error).__module__.startswith("megacpp_overlays."):  # the package's own errors need no traceback
        traceback.print_exc()
    way_out = f"unset {_MEANT}"
    if _STARTUP_FILE:
        way_out = (
            f"run `megacpp-overlays disable`, or delete {_STARTUP_FILE}, which arms every Python of this environment,"
        )
    text = (
        f"megacpp_overlays: {type(error).__name__}: {error}\n"
        "megacpp_overlays: this Python was to be armed before its first line and is not, so it ends here.\n"
        f"megacpp_overlays: {way_out} to start it without overlays.\n"
    )
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except Exception:  # noqa: BLE001, S110 - none, closed or broken: the exit code has to say it
        pass
    os._exit(2 if is_setting else 1)  # SystemExit would end as a fatal error of the interpreter


def _is_here(entry: str) -> bool:
    try:
        return os.path.abspath(entry) == _HERE
    except OSError:  # a relative one, in a working folder that was deleted: there is nothing behind it
        return False


def _run_the_next(keep: bool) -> None:
    """Import the `sitecustomize` behind this one. Without one, Python's own ImportError is raised, which `site` expects.

    Args:
        keep: leave this folder on `sys.path`, for libraries that pass `sys.path` to children as their PYTHONPATH.
    """
    ours = [(at, entry) for at, entry in enumerate(sys.path) if _is_here(entry)]
    for _, entry in ours:
        sys.path.remove(entry)
    sys.modules.pop("sitecustomize", None)
    try:
        __import__("sitecustomize")
    finally:
        if keep:
            for at, entry in ours[:1]:
                # Under -P no folder of a script comes before it, and the first entry is not for us to take.
                sys.path.insert(max(at, 1) if getattr(sys.flags, "safe_path", False) else at, entry)


_meant = _is_meant()
if _meant:
    try:
        _arm()
    except BaseException as error:  # noqa: BLE001 - whatever it is, it must not pass in silence
        _stop(error)
if __name__ == "sitecustomize":  # under another name there is no next one
    _run_the_next(_meant)
