"""`megacpp-overlays run LAUNCHER ...` is `python LAUNCHER ...`, armed: the two are run side by side."""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import warm_python
from hypothesis import given
from hypothesis import strategies as st
from launchers import environment, launch, write
from made_up import Upstream
from places import HANG_S, ROOT
from releases import only

from megacpp_overlays import cli
from megacpp_overlays.cli import run

MODULE = ("-m", "megacpp_overlays", "run")
CONSOLE = ("-c", "import sys; from megacpp_overlays.cli import main; sys.exit(main())", "run")

WORDS = st.lists(
    st.text(min_size=0, max_size=6) | st.sampled_from(["--", "-", "-h", "--help", "-m", "-c", "-I", "run"])
)


Ended = tuple[int, str, str]
"""How a process ended: exit code, standard output, standard error."""


def ended(*words: str | Path, env: dict[str, str], stdin: str = "", cwd: Path | None = None) -> Ended:
    done = launch(*words, env=env, stdin=stdin, cwd=cwd)
    return done.returncode, done.stdout, done.stderr


def side_by_side(
    *words: str | Path, env: dict[str, str], stdin: str = "", cwd: Path | None = None, options: Sequence[str] = ()
) -> tuple[Ended, Ended]:
    """Run a plain Python and `megacpp-overlays run` with the same arguments, and return the end of each."""
    env = {**env, "MEGACPP_OVERLAYS_LOG": os.devnull}  # our log is the one intended difference
    plain = ended(*options, *words, env=env, stdin=stdin, cwd=cwd)
    return plain, ended(*options, *MODULE, *words, env=env, stdin=stdin, cwd=cwd)


@pytest.fixture
def env(upstream: Upstream) -> dict[str, str]:
    return environment(upstream)


STATE = """
import importlib, json, os, sys
module = importlib.import_module(os.environ["NAME"] + ".layers")
print(json.dumps({"double": module.double(1), "argv": sys.argv, "armed first": "megacpp_overlays" in sys.modules}))
"""


def test_the_launcher_runs_armed_and_knows_nothing_of_it(upstream: Upstream, env: dict[str, str]) -> None:
    launcher = write(upstream, STATE)

    plain, ours = (json.loads(each[1]) for each in side_by_side(launcher, "--steps", "3", env=env))

    assert plain == {"double": 3, "argv": [str(launcher), "--steps", "3"], "armed first": False}
    assert ours == {**plain, "double": 2, "armed first": True}


def test_armed_overlays_are_named_once(upstream: Upstream, env: dict[str, str]) -> None:
    launcher = write(upstream, "import subprocess, sys; subprocess.run([sys.executable, '-c', 'pass'], check=True)")

    _, _, stderr = ended(*MODULE, launcher, env={**env, "MEGACPP_OVERLAYS_LOG_LEVEL": "debug"})

    assert stderr.count("mode auto; armed: ") == 1


ABOUT_ITSELF = """
import __main__, json, os, sys
flags = {name: getattr(sys.flags, name) for name in dir(sys.flags) if name[0] != "_" and not callable(getattr(sys.flags, name))}
path = [entry for entry in sys.path if not entry.endswith("startup")]
print(json.dumps([sys.argv, sys.path[0], path, flags, sys.warnoptions, sys._xoptions, sys.executable, sys.prefix,
    __name__, __package__, globals().get("__file__"), __spec__ and __spec__.name, os.getcwd(), sys.stdin.read(),
    __main__.__dict__ is globals(), "sitecustomize" in sys.modules, sys.orig_argv[1:]]))
"""


@pytest.mark.parametrize(
    "options",
    [
        (),
        pytest.param(("-u",), marks=pytest.mark.full),
        pytest.param(("-X", "dev"), marks=pytest.mark.full),
        pytest.param(("-Xdev", "-W", "error", "-OO"), marks=pytest.mark.full),
        ("-uBW", "ignore::DeprecationWarning", "-Xutf8"),
    ],
    ids=" ".join,
)
def test_it_is_the_same_python_with_the_same_options(
    upstream: Upstream, env: dict[str, str], options: tuple[str, ...]
) -> None:
    launcher = write(upstream, ABOUT_ITSELF)

    plain, ours = side_by_side(launcher, "--help", env=env, stdin="typed", options=options)

    def without_spelling(text: str) -> list[object]:
        *facts, words = json.loads(text)
        return [*facts, run.split(words)]

    assert plain[0] == 0
    assert without_spelling(ours[1]) == without_spelling(plain[1])
    assert "typed" in json.loads(ours[1])
    assert (ours[0], ours[2]) == (plain[0], plain[2])


def test_options_may_also_stand_where_python_has_them(upstream: Upstream, env: dict[str, str]) -> None:
    launcher = write(upstream, "import sys; print(sys.flags.optimize, sys.argv[1:])")

    assert ended(*MODULE, "-O", launcher, "-O", env=env)[1] == "1 ['-O']\n"


def test_modules_code_and_standard_input_are_launchers_too(upstream: Upstream, env: dict[str, str]) -> None:
    package = write(upstream, ABOUT_ITSELF, "trainer").parent

    for words in (("-m", "trainer", "-m", "x"), ("-c", ABOUT_ITSELF, "--", "-c"), ("-mtrainer",), ("--", "trainer.py")):
        plain, ours = side_by_side(*words, env=env, cwd=package)
        assert ours == plain
        assert plain[0] == 0
    assert ended("-um", "megacpp_overlays", "run", "-c", "print(1)", env=env)[1] == "1\n"
    plain, ours = side_by_side("-", "x", env=env, stdin="import sys; print(sys.argv, sys.path[0])")
    assert ours == plain == (0, "['-', 'x'] \n", "")


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("--help",), marks=pytest.mark.full),
        pytest.param(("--", "--steps"), marks=pytest.mark.full),
        pytest.param(("-m", "megacpp_overlays", "run"), marks=pytest.mark.full),
        ("", " ", "a b", "*", "$HOME", "'", '"', "\\", "é", "\n"),
        ("-I", "-E", "-S", "-h", "--version", "--json"),
    ],
)
def test_the_arguments_of_the_launcher_are_not_touched(
    upstream: Upstream, env: dict[str, str], words: tuple[str, ...]
) -> None:
    launcher = write(upstream, "import sys; print(ascii(sys.argv[1:]))")

    plain, ours = side_by_side(launcher, *words, env=env)

    assert ours == plain == (0, f"{list(words)!a}\n", "")


@given(words=WORDS, options=st.lists(st.sampled_from(["-u", "-B", "-Wignore", "-Xdev", "-bb"])))
def test_no_argument_is_lost_or_read_as_ours(words: list[str], options: list[str]) -> None:
    became: list[Sequence[str]] = []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "_become", became.append)
        patch.setattr(sys, "orig_argv", ["python", *options, "-m", "megacpp_overlays", "run"])
        cli.main(["run", "train.py", *words])

    [given_to_python] = became
    assert list(given_to_python[-len(words) - 1 :]) == ["train.py", *words]
    assert run.split(given_to_python)[0] == run.split(options)[0]


ENDS = [
    "raise SystemExit('a sentence')",
    "def fail(x):\n    return 1 / x\n\nfail(0)",
    "raise KeyboardInterrupt",
    "import os; os.abort()",
]
"""How a launcher ends of every day: with a word, with a traceback, and by two signals."""
OTHER_ENDS = [
    "pass",
    "raise SystemExit(3)",
    "x = (",
    "import no_such_module",
    "import os; os._exit(7)",
    "import sys; sys.stdout.write('no newline'); sys.exit(True)",
    "import atexit; atexit.register(print, 'bye')",
]


@pytest.mark.parametrize("code", only([*ENDS, *OTHER_ENDS], ENDS))
def test_exit_codes_output_and_tracebacks_are_the_same(upstream: Upstream, env: dict[str, str], code: str) -> None:
    launcher = write(upstream, code)

    plain, ours = side_by_side(launcher, env=env)

    assert ours == plain


def test_a_launcher_that_is_not_there_is_for_python_to_report(env: dict[str, str]) -> None:
    plain, ours = side_by_side("/no/such/train.py", env=env)

    assert ours == plain
    assert ours[0] == 2


SLEEPS = """
import os, signal, sys, time
if len(sys.argv) > 1:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(42))
print(os.getpid(), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    "number", only([signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGUSR1], [signal.SIGTERM])
)
@pytest.mark.parametrize("handled", [[], ["handled"]], ids=["by default", "handled"])
def test_signals_reach_the_launcher_which_has_the_process_that_was_started(
    upstream: Upstream, env: dict[str, str], number: signal.Signals, handled: list[str]
) -> None:
    launcher = write(upstream, SLEEPS)
    codes = []
    # In the background of a shell the tests ignore SIGINT, and their child processes would inherit that.
    heeded = None if number is signal.SIGKILL else functools.partial(signal.signal, number, signal.SIG_DFL)

    for words in ((), MODULE):
        command = [sys.executable, *words, str(launcher), *handled]
        with subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, preexec_fn=heeded
        ) as process:
            assert process.stdout is not None
            assert int(process.stdout.readline()) == process.pid
            process.send_signal(number)
            codes.append(process.wait(HANG_S))

    expected = 42 if handled and number is signal.SIGTERM else -number
    assert codes == [expected, expected]


PICKLES = """
import importlib, json, multiprocessing, os

class Config:
    def __init__(self, steps):
        self.steps = steps

    def double(self):
        return importlib.import_module(os.environ["NAME"] + ".layers").double(self.steps)

def work(config):
    return type(config).__module__, config.double(), Config(5)

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        module, doubled, back = pool.apply(work, (Config(1),))
    print(json.dumps([module, doubled, type(back) is Config, back.steps]))
"""


def test_classes_of_main_travel_to_a_spawn_pool(upstream: Upstream, env: dict[str, str]) -> None:
    launcher = write(upstream, PICKLES)

    plain, ours = (json.loads(each[1]) for each in side_by_side(launcher, env=env))

    assert plain == ["__mp_main__", 3, True, 5]
    assert ours == ["__mp_main__", 2, True, 5]


def test_it_works_from_a_bare_checkout_that_only_the_current_folder_leads_to(upstream: Upstream) -> None:
    launcher = write(upstream, "import sys, megacpp_overlays; print(megacpp_overlays.__file__)")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    code, stdout, _ = ended(*MODULE, launcher, env=env, cwd=ROOT)

    assert (code, stdout) == (0, f"{ROOT}/megacpp_overlays/__init__.py\n")


def test_the_console_script_is_the_same_command(upstream: Upstream, env: dict[str, str]) -> None:
    launcher = write(upstream, STATE)

    assert json.loads(ended(*CONSOLE, launcher, "-m", env=env)[1])["double"] == 2


@pytest.mark.parametrize(
    ("where", "flag"),
    only(itertools.product(("before", "after"), ("-I", "-E", "-S", "-uI")), [("before", "-uI"), ("after", "-S")]),
)
def test_a_python_that_cannot_be_armed_is_refused(
    upstream: Upstream, env: dict[str, str], flag: str, where: str
) -> None:
    launcher = write(upstream, "print('ran')")
    # Neither -I nor -E sees PYTHONPATH, so the path is set by hand; `main` runs as in the console script.
    code = f"import sys; sys.path[:0] = {env['PYTHONPATH'].split(os.pathsep) + sys.path!r}; {CONSOLE[1]}"
    before, after = ((flag,), ()) if where == "before" else ((), (flag,))

    exit_code, stdout, stderr = ended(*before, "-c", code, "run", *after, launcher, env=env)

    assert (exit_code, stdout) == (2, "")
    assert f"leave -{flag[-1]} out" in " ".join(stderr.split())


@pytest.mark.parametrize("words", [(), ("-u",), ("-X", "dev")])
def test_a_launcher_must_be_given(env: dict[str, str], words: tuple[str, ...]) -> None:
    code, _, stderr = ended(*MODULE, *words, env=env)

    assert code == 2
    assert "there is no launcher to run" in stderr


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_is_about_the_command(env: dict[str, str], word: str) -> None:
    code, stdout, _ = ended(*MODULE, word, env=env)

    assert code == 0
    assert stdout.startswith("usage: megacpp-overlays run [--witness] [--audit FILE] [--verify-ranks]")
    assert "[--require ID=DECISION]..." in stdout
    assert "[options of Python] (LAUNCHER | -m MODULE | -c CODE) [its arguments]\n" in stdout


RANK = """
import importlib, json, os, sys

doubled = importlib.import_module(os.environ["NAME"] + ".layers").double(1)
with open(os.path.join(sys.argv[2], os.environ["RANK"]), "w") as file:
    json.dump([sys.argv[1:2], doubled, os.environ["WORLD_SIZE"], sys.path[0], __name__], file)
sys.exit(int(sys.argv[3]))
"""


@pytest.mark.upstream
def test_it_works_under_torchrun(upstream: Upstream, env: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("torch")
    launcher = write(upstream, RANK)
    torchrun = ("-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0")

    done = warm_python.run(
        [*torchrun, "--standalone", *MODULE, launcher, "--x", tmp_path, "0"],
        {**env, "OMP_NUM_THREADS": "1"},
        timeout=HANG_S,
    )

    assert done.returncode == 0, done.stderr
    said = [json.loads((tmp_path / rank).read_text()) for rank in "01"]
    assert said == [[["--x"], 2, "2", str(launcher.parent), "__main__"]] * 2
