"""`megacpp-overlays checkpoint`: its reports, and its handling of crafted files.

Checkpoints of several ranks, written by megatron-core without the overlay and with it, are those of
tests/overlays/test_fully_reshardable_padding.py; here torch writes most of them, in the same format.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pickle
import struct
import subprocess
import sys
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from launched_reshardable import launch, step
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor

from megacpp_overlays import cli
from megacpp_overlays.cli.codes import ExitCode
from megacpp_overlays.upkeep.checkpoint import inert_pickle

STATE = "optimizer.state"
ROWS, COLUMNS = 40, 50
COUNT = ROWS * COLUMNS


def parameter(
    name: str = "rows", *, ahead: int = 0, behind: int = 10**6, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Any]:
    """Return a weight and its state. The state is cut `ahead` elements too far on, out of a buffer with `behind` elements behind it."""
    generator = torch.Generator().manual_seed(len(name))

    def cut(gathered: torch.Tensor) -> torch.Tensor:
        found = gathered[ahead : ahead + COUNT]
        return torch.nn.functional.pad(found, (0, COUNT - len(found))).view(ROWS, COLUMNS).clone()

    whole = [torch.randn(COUNT + min(behind, ahead), generator=generator) for _ in range(3)]
    keys = ("param", "exp_avg", "exp_avg_sq")
    state = {f"{STATE}.{key}.{name}": cut(each) for key, each in zip(keys, whole, strict=True)}
    return {name: whole[0][:COUNT].view(ROWS, COLUMNS).to(dtype), **state}


def write(folder: Path, *parameters: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it writes in a single process
        whole = {key: each for one in parameters for key, each in one.items()}
        dcp.save(whole, storage_writer=dcp.FileSystemWriter(folder, single_file_per_rank=True), no_dist=True)
    return folder


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Run the command and return its exit code and output. Assert that the checkpoint is unchanged."""

    def run(folder: Path, *options: str) -> tuple[int, str]:
        before = content(folder)
        code = cli.main(["checkpoint", str(folder), *options])
        assert content(folder) == before
        written = capsys.readouterr()
        return code, written.out + written.err

    return run


def content(folder: Path) -> dict[str, Any]:
    found = [each for each in sorted(folder.rglob("*")) if each.is_file()]
    return {str(each): (each.stat().st_mtime_ns, hashlib.sha256(each.read_bytes()).digest()) for each in found}


Said = Callable[..., tuple[int, str]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_checkpoint_whose_state_is_its_own_is_right(tmp_path: Path, said: Said, dtype: torch.dtype) -> None:
    code, text = said(write(tmp_path, parameter("one", dtype=dtype), parameter("other", dtype=dtype)))

    assert (code, text.strip()) == (0, f"{tmp_path}: right: all parameters are right")


def test_a_broken_checkpoint_is_reported_with_its_parameters(tmp_path: Path, said: Said) -> None:
    code, text = said(
        write(tmp_path, parameter("first"), parameter("inner", ahead=128), parameter("the last", ahead=200, behind=0))
    )

    assert code == 1
    assert text.splitlines() == [
        f"{tmp_path}: written broken: 2 of 3 parameters are not right",
        "    inner: its fp32 weights begin 128 elements too far on",
        "    the last: its fp32 weights begin 200 elements too far on and its state ends in 200 zeros",
    ]


def test_json_has_every_parameter(tmp_path: Path, said: Said) -> None:
    code, text = said(write(tmp_path, parameter("first"), parameter("inner", ahead=128)), "--json")

    found = json.loads(text)
    assert (code, found["schema"], found["checkpoint"], found["verdict"]) == (1, 1, str(tmp_path), "written broken")
    assert found["parameters"] == [
        {"name": "first", "right": True, "displaced_by": 0, "zeros_at_the_end": 0, "says": "right"},
        {
            "name": "inner",
            "right": False,
            "displaced_by": 128,
            "zeros_at_the_end": 0,
            "says": "its fp32 weights begin 128 elements too far on",
        },
    ]


def test_other_formats_are_not_concerned(tmp_path: Path, said: Said) -> None:
    state = {key.replace(".param.", ".fp32_param."): each for key, each in parameter(ahead=128).items()}

    code, text = said(write(tmp_path, state))

    assert (code, "not concerned" in text) == (0, True)


def test_masters_that_differ_without_a_mark_are_undecided(tmp_path: Path, said: Said) -> None:
    state = parameter()
    state["rows"] = (state["rows"].float() * 1.05).bfloat16()  # as a weight that went through FP8

    code, text = said(write(tmp_path, state))

    assert code == ExitCode.NOT_CHECKED
    assert "cannot be told: 1 of 1 parameters are not right" in text
    assert "rows: its fp32 weights are not its weights, and do not say why" in text


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda state: state.pop("rows"), "the checkpoint has no weight of that name"),
        (lambda state: state.update(rows=torch.zeros(3, 4).bfloat16()), "its tensors have different shapes"),
    ],
    ids=["no weight", "another shape"],
)
def test_masters_with_nothing_to_compare_them_with_are_undecided(
    tmp_path: Path, said: Said, change: Callable[[dict[str, Any]], object], why: str
) -> None:
    state = parameter(ahead=128)
    change(state)

    code, text = said(write(tmp_path, state))

    assert code == ExitCode.NOT_CHECKED
    assert f"rows: cannot be compared: {why}" in text


def test_a_state_of_several_optimizers_is_read_as_well(tmp_path: Path, said: Said) -> None:
    state = {key.replace(STATE, f"chained_1.{STATE}"): each for key, each in parameter(ahead=128).items()}

    assert said(write(tmp_path, state))[0] == 1


def test_an_empty_parameter_is_right(tmp_path: Path, said: Said) -> None:
    none = {key: each[:0] for key, each in parameter().items()}

    assert said(write(tmp_path, none))[0] == 0


STATES = {"right": [0, 0, 0], "broken": [0, 0, 64], "grown": [0, None]}
"""Parameters in shards: the state of each shard is its own, or begins so many elements too far on, or is zeros."""


@pytest.fixture(
    scope="module", params=["torch", pytest.param("megatron", marks=[pytest.mark.full, pytest.mark.upstream])]
)
def shards(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of `STATES`: torch writes them in shards as Megatron has it do, or Megatron does, which has to be imported."""
    folder = tmp_path_factory.mktemp("shards")
    if request.param == "megatron":
        launch(folder / "plan", 1, *(step("save_shards", to=folder / name, displaced=STATES[name]) for name in STATES))
    else:
        with one_rank():
            for name, displaced in STATES.items():
                write(folder / name, in_shards(displaced))
    return folder


def in_shards(displaced: list[int | None]) -> dict[str, Any]:
    """Return a parameter whose shards are `parameter`s, the state of each cut too far on by so much."""
    parts = [parameter("x" * (number + 1), ahead=ahead or 0) for number, ahead in enumerate(displaced)]
    found = {}
    for keys in zip(*parts, strict=True):
        pieces = [part[key] for part, key in zip(parts, keys, strict=True)]
        if keys[0].startswith(STATE):
            pieces = [piece * (ahead is not None) for piece, ahead in zip(pieces, displaced, strict=True)]
        local = [
            Shard(piece, ShardMetadata([number * ROWS, 0], [ROWS, COLUMNS], "rank:0/cpu"))
            for number, piece in enumerate(pieces)
        ]
        name = f"{keys[0].removesuffix('x')}rows"
        found[name] = ShardedTensor._init_from_local_shards(local, (ROWS * len(pieces), COLUMNS))
    return found


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """Tensors in shards belong to a process group, of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def test_each_shard_of_a_parameter_is_compared(shards: Path, said: Said) -> None:
    assert said(shards / "right")[0] == 0
    code, text = said(shards / "broken")
    assert code == 1
    assert "rows: its fp32 weights begin 64 elements too far on" in text


def test_a_shard_of_zeros_next_to_a_right_one_is_undecided(shards: Path, said: Said) -> None:
    """As where a vocabulary grew at a restart, by the rows of a whole rank, and was saved before it was trained on."""
    code, text = said(shards / "grown")

    assert code == ExitCode.NOT_CHECKED
    assert "rows: its fp32 weights are not its weights, and do not say why" in text


def test_nothing_but_zeros_is_reported_where_no_shard_is_right(tmp_path: Path, said: Said) -> None:
    code, text = said(write(tmp_path, parameter("first"), parameter("the last", ahead=COUNT, behind=0)))

    assert code == 1
    assert f"the last: its state ends in {COUNT} zeros" in text


# Third-party files


class Touch:
    """A pickle that creates a folder if it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def fails(said: Said, folder: Path, *words: str) -> None:
    code, text = said(folder)
    assert code == ExitCode.NOT_CHECKED
    assert all(word in text for word in words), text
    assert "Traceback" not in text


def test_a_folder_without_metadata_is_no_checkpoint(tmp_path: Path, said: Said) -> None:
    fails(said, tmp_path, f"{tmp_path} has no .metadata")


def test_the_folder_above_names_its_iterations(tmp_path: Path, said: Said) -> None:
    write(tmp_path / "iter_0000100", parameter())
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("100")

    fails(said, tmp_path, "name one of its iterations, such as iter_0000100")


@pytest.mark.parametrize("text", [b"", b"not a pickle", pickle.dumps({"a": 1}), pickle.dumps([1] * 10)[:-3]])
def test_metadata_that_are_none_are_an_error(tmp_path: Path, said: Said, text: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(text)

    fails(said, tmp_path, f"{tmp_path}/.metadata")


def test_a_fifo_in_the_place_of_metadata_does_not_stop_it(tmp_path: Path, said: Said) -> None:
    os.mkfifo(tmp_path / ".metadata")

    fails(said, tmp_path, "no regular file")


def test_nothing_that_metadata_name_is_called(tmp_path: Path, said: Said) -> None:
    folder = write(tmp_path / "saved", parameter())
    edit(folder, lambda said_of: said_of.planner_data.update(rows=Touch(tmp_path / "made")))

    assert said(folder)[0] == 0
    assert not (tmp_path / "made").exists()
    (folder / ".metadata").write_bytes(pickle.dumps(Touch(tmp_path / "made")))
    fails(said, folder, "no metadata of torch.distributed.checkpoint")
    assert not (tmp_path / "made").exists()


def test_a_pickle_that_asks_for_room_gets_none(tmp_path: Path, said: Said) -> None:
    """The reader in C makes a table of as many entries as this one says: 32 GiB."""
    (tmp_path / ".metadata").write_bytes(b"\x80\x04N" + b"r" + struct.pack("<I", 2**32 - 1) + b".")

    fails(said, tmp_path, "no metadata")


GIB = struct.pack("<Q", 6 << 30)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"\x80\x05\x96" + GIB + b".", "its 12 bytes ask for far more memory than metadata of that length take"),
        (b"\x80\x05(" + b"\x8f" * 400_000 + b"t.", "ask for far more memory"),
        (b"\x80\x05(" + b"".join(b"cx\n%d\n" % each for each in range(1001)) + b"t.", "names more than 1000 classes"),
        (b"\x80\x05\x95" + GIB + b"N.", "is no metadata"),
        (b"\x80\x05\x8e" + GIB + b"N.", "cannot be read"),
        (b"\x80\x05\x8d" + GIB + b"N.", "cannot be read"),
        (b"\x80\x05\x8b\xff\xff\xff\x7fN.", "cannot be read"),
    ],
    ids=["a buffer", "sets", "classes", "a frame", "bytes", "a text", "a number"],
)
def test_metadata_get_no_more_memory_than_their_length_explains(
    tmp_path: Path, said: Said, text: bytes, says: str
) -> None:
    (tmp_path / ".metadata").write_bytes(text)
    tracemalloc.start()
    try:
        fails(said, tmp_path, says)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert most < (128 << 20) + 100 * len(text)


def test_the_header_of_a_tensor_gets_no_more_memory_than_its_length_explains(tmp_path: Path, said: Said) -> None:
    folder = write(tmp_path, parameter())
    stored(folder, f"{STATE}.param.rows", {"data.pkl": b"\x80\x05\x96" + GIB + b".", "data/0": NUMBERS})

    fails(said, folder, "the header of", "is not read: its 12 bytes ask for far more memory")


def test_a_buffer_that_is_there_is_read() -> None:
    text = pickle.dumps([bytearray(b"abc"), {"a": (1, 2.5, None, True)}, {1, 2}, frozenset({3}), 2**70], 5)

    assert inert_pickle.load(io.BytesIO(text), "it") == pickle.loads(text)


def edit(folder: Path, change: Callable[[Any], object]) -> None:
    """Change the metadata of a checkpoint that we wrote."""
    path = folder / ".metadata"
    found = pickle.loads(path.read_bytes())
    change(found)
    path.write_bytes(pickle.dumps(found))


def places(change: Callable[[Any], object]) -> Callable[[Any], object]:
    """Return an edit of the recorded place of every tensor."""
    return lambda found: [change(each) for each in found.storage_data.values()]


def at(path: object) -> Callable[[Any], object]:
    """Return an edit that records another file for every tensor."""
    return places(lambda each: vars(each).update(relative_path=path))


WRONG_PLACES: dict[str, tuple[Callable[[Any], object], str]] = {
    "above": (at("../other.distcp"), "not a file of this checkpoint"),
    "elsewhere": (at("/etc/passwd"), "not a file of this checkpoint"),
    "the folder above": (at(".."), "not a file of this checkpoint"),
    "a link that leads away": (at("away"), "not a file of this checkpoint"),
    "gone": (at("gone"), "cannot be read: No such file"),
    "a fifo": (at("pipe"), "cannot be read: it is no regular file"),
    "no name": (at(7), "an entry without a valid name"),
    "before its file": (places(lambda each: vars(each).update(offset=-5)), "an entry without a valid name"),
    "past all files": (places(lambda each: vars(each).update(offset=2**70)), "an entry without a valid name"),
    "past its file": (places(lambda each: vars(each).update(offset=2**40)), "ends before it does"),
    "longer than its file": (places(lambda each: vars(each).update(length=2**40)), "ends before it does"),
    "too short": (places(lambda each: vars(each).update(length=100)), "cannot be read"),
    "compressed": (
        places(lambda each: vars(each).update(transform_descriptors=["zstd"])),
        "compressed or encrypted",
    ),
    "no entry": (lambda found: found.storage_data.update(more=1), "an entry without a valid name"),
    "no places": (
        lambda found: setattr(found, "storage_data", 3),
        "no metadata of torch.distributed.checkpoint",
    ),
}


@pytest.mark.parametrize("where", WRONG_PLACES)
def test_a_place_that_cannot_be_is_an_error(tmp_path: Path, said: Said, where: str) -> None:
    change, says = WRONG_PLACES[where]
    folder = write(tmp_path / "saved", parameter())
    os.mkfifo(folder / "pipe")
    (tmp_path / "elsewhere").write_bytes((folder / "__0_0.distcp").read_bytes())
    (folder / "away").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "other.distcp").symlink_to(tmp_path / "elsewhere")
    edit(folder, change)

    fails(said, folder, says)


def stored(folder: Path, name: str, entries: dict[str, bytes], *, compressed: bool = False, cut: int = 0) -> None:
    """Put an archive in the place of a tensor of a checkpoint."""
    path = folder / "made.distcp"
    kind = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", kind) as archive:
        for entry, text in entries.items():
            archive.writestr(f"archive/{entry}", text)

    def change(found: Any) -> None:
        for index, place in found.storage_data.items():
            if index.fqn == name:
                vars(place).update(relative_path=path.name, offset=0, length=path.stat().st_size)

    edit(folder, change)
    if cut:
        os.truncate(path, path.stat().st_size - cut)


def header(**other: Any) -> bytes:
    """Return torch's description of a tensor: storage, offset, shape, stride."""
    said_of = {
        "kind": "FloatStorage",
        "offset": 0,
        "shape": (ROWS, COLUMNS),
        "stride": (COLUMNS, 1),
        "key": "0",
        **other,
    }

    class Header:
        def __reduce__(self) -> tuple[Any, ...]:
            kind = getattr(torch, said_of["kind"])
            storage = Persistent(("storage", kind, said_of["key"], "cpu", COUNT))
            return torch._utils._rebuild_tensor_v2, (
                storage,
                *(said_of[key] for key in ("offset", "shape", "stride")),
                False,
                {},
            )

    class Writer(pickle._Pickler):  # type: ignore[name-defined,misc]
        def persistent_id(self, given: Any) -> Any:
            return given.pid if isinstance(given, Persistent) else None

    file = io.BytesIO()
    Writer(file, 2).dump(Header())
    return file.getvalue()


class Persistent:
    def __init__(self, pid: Any) -> None:
        self.pid = pid


NUMBERS = b"\0" * 4 * COUNT


WRONG_TENSORS: dict[str, tuple[dict[str, bytes], str]] = {
    "no header": ({"data/0": NUMBERS}, "no tensor that torch.save wrote"),
    "no pickle": ({"data.pkl": b"no pickle", "data/0": NUMBERS}, "the header of"),
    "no tensor": ({"data.pkl": pickle.dumps(3), "data/0": NUMBERS}, "no plain tensor"),
    "a large header": ({"data.pkl": b"N" * (1 << 20) + b"N.", "data/0": NUMBERS}, "is larger than"),
    "no numbers": ({"data.pkl": header()}, "fewer numbers than it says"),
    "too few": ({"data.pkl": header(), "data/0": NUMBERS[4:]}, "fewer numbers than it says"),
    "too far on": ({"data.pkl": header(offset=1), "data/0": NUMBERS}, "fewer numbers than it says"),
    "elsewhere": ({"data.pkl": header(key="../0"), "data/0": NUMBERS}, "fewer numbers than it says"),
    "endless": ({"data.pkl": header(shape=(1 << 40, 1 << 40)), "data/0": NUMBERS}, "do not lie one behind the other"),
    "transposed": (
        {"data.pkl": header(shape=(COLUMNS, ROWS), stride=(1, COLUMNS)), "data/0": NUMBERS},
        "do not lie one behind the other",
    ),
    "all the same": ({"data.pkl": header(stride=(0, 0)), "data/0": NUMBERS}, "do not lie one behind the other"),
    "negative": ({"data.pkl": header(shape=(-1, 3)), "data/0": NUMBERS}, "do not lie one behind the other"),
    "other numbers": (
        {"data.pkl": header(kind="LongStorage"), "data/0": NUMBERS},
        "its numbers are torch.LongStorage",
    ),
    "other order": ({"data.pkl": header(), "data/0": NUMBERS, "byteorder": b"big"}, "another order of bytes"),
}


@pytest.mark.parametrize("wrong", WRONG_TENSORS)
def test_a_tensor_that_does_not_fit_its_header_is_an_error(tmp_path: Path, said: Said, wrong: str) -> None:
    entries, says = WRONG_TENSORS[wrong]
    folder = write(tmp_path, parameter())
    stored(folder, f"{STATE}.param.rows", entries)

    fails(said, folder, f"{STATE}.param.rows", says)


def test_a_made_up_tensor_that_fits_its_header_is_read(tmp_path: Path, said: Said) -> None:
    state = parameter()
    folder = write(tmp_path, state)
    own = state[f"{STATE}.param.rows"].numpy().tobytes()
    stored(folder, f"{STATE}.param.rows", {"data.pkl": header(offset=2), "data/0": bytes(8) + own})

    assert said(folder)[0] == 0


def test_a_compressed_tensor_is_not_unpacked(tmp_path: Path, said: Said) -> None:
    folder = write(tmp_path, parameter())
    stored(folder, f"{STATE}.param.rows", {"data.pkl": header(), "data/0": NUMBERS}, compressed=True)

    fails(said, folder, "is compressed, or does not lie where it is said to")


def test_a_file_that_was_cut_is_an_error(tmp_path: Path, said: Said) -> None:
    folder = write(tmp_path, parameter())
    path = folder / "__0_0.distcp"
    os.truncate(path, path.stat().st_size // 2)

    fails(said, folder, "cannot be read")


def test_nothing_that_a_tensor_names_is_called(tmp_path: Path, said: Said) -> None:
    folder = write(tmp_path / "saved", parameter())
    stored(folder, f"{STATE}.param.rows", {"data.pkl": pickle.dumps(Touch(tmp_path / "made")), "data/0": NUMBERS})

    fails(said, folder, "it is no plain tensor")
    assert not (tmp_path / "made").exists()


def test_without_torch_the_error_names_it(tmp_path: Path) -> None:
    folder = write(tmp_path / "saved", parameter())
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "torch.py").write_text("raise ModuleNotFoundError('there is none', name='torch')\n")

    done = subprocess.run(
        [sys.executable, "-m", "megacpp_overlays", "checkpoint", str(folder)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "none"), "MEGACPP_OVERLAYS_LOG": "logging"},
    )

    assert done.returncode == ExitCode.MISSING_EXTRA
    assert "this command needs torch" in done.stderr
