"""Configurations in files, whose format is detected from the text: JSON, YAML, a shell script, a log, the `repr` of a configuration object."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from megacpp_overlays import files
from megacpp_overlays.concerns import command_lines, printed_configs, transformers_configs
from megacpp_overlays.concerns.configuration import UNKNOWN, Configuration, Vocabulary, of_a_run
from megacpp_overlays.concerns.plain_values import plain_value
from megacpp_overlays.errors import ConfigurationError

_FLAG = re.compile(r"(?:^|\s)['\"]?--[a-z][\w-]+")
_OF_ARGUMENTS = frozenset(
    {"num_experts", "micro_batch_size", "train_iters", "train_samples", "tokenizer_type", "use_mcore_models"}
)
"""Keys that arguments of Megatron-LM have and its configuration classes have not."""
_SECTIONS_OF_CONFIGS = frozenset({"language_model", "model_parallel", "model"})
"""Sections of a YAML whose keys are fields of configuration classes, regardless of other sections."""
_DEEPEST = 20
_KINDS = (
    "JSON or YAML of Megatron's arguments or configuration, a shell script or a file of arguments, a log with the arguments of a run, "
    "the repr of a TransformerConfig, or the config.json of a model of transformers"
)


def read(path: Path) -> Configuration:
    """Return the configuration of a model and its run in a file.

    Raises:
        ConfigurationError: the file cannot be read, or is none of the kinds that are known.
    """
    try:
        text = files.read_text(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigurationError(f"{path} cannot be read ({reason}): name a file of {_KINDS}") from error
    try:
        return _of_text(text, path)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path} is not understood ({error}): it may be {_KINDS}") from error


def _of_text(text: str, path: Path) -> Configuration:
    name = path.name
    if text.lstrip()[:1] in {"{", "["} and path.suffix not in {".yaml", ".yml"}:
        return _of_data(json.loads(text), name)
    if path.suffix in {".yaml", ".yml"}:
        return _of_data(_yaml(text, path), name)
    if printed_configs.is_printed_arguments(text):
        return printed_configs.from_printed_arguments(text, f"{name}, arguments in a log")
    if printed_configs.is_repr(text):
        return printed_configs.from_repr(text, f"{name}, the repr of a configuration")
    if _FLAG.search(text):
        return command_lines.from_script(text, f"{name}, arguments of Megatron-LM")
    raise ValueError("nothing of a configuration is in it")


def _yaml(text: str, path: Path) -> object:
    try:
        import yaml  # noqa: PLC0415 - not a requirement of this package; Megatron's YAML needs it as well
    except ImportError as error:
        raise ConfigurationError(
            f"{path} is YAML, and this Python has no PyYAML to read it with: install pyyaml, or give the arguments in another form"
        ) from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error).splitlines()[0]) from error


def _of_data(data: object, name: str) -> Configuration:
    if isinstance(data, list) and data and all(isinstance(each, str) for each in data):
        return command_lines.from_words(data, f"{name}, arguments of Megatron-LM")
    if not isinstance(data, Mapping) or not data:
        raise ValueError("it holds no mapping of keys")
    if transformers_configs.is_config(data):
        return transformers_configs.from_mapping(data, f"{name}, a model of transformers")
    for section in _mappings(data):
        if section and all(str(key).startswith("--") for key in section):
            return command_lines.of_mapping(section, f"{name}, arguments of Megatron-LM")
    values: dict[str, tuple[object, ...]] = {}
    for key, value in _leaves(data):
        plain = plain_value(value) if isinstance(value, str) else value
        values[key] = (*values.get(key, ()), plain)
    if any(each is not None for each in values.pop("mixed_precision", ())):  # it sets these when the run begins
        values = {**values, **dict.fromkeys(("fp16", "bf16", "params_dtype"), (UNKNOWN,))}
    is_of_arguments = bool(_OF_ARGUMENTS & values.keys()) and not _SECTIONS_OF_CONFIGS & data.keys()
    vocabulary = Vocabulary.ARGUMENTS if is_of_arguments else Vocabulary.CONFIG
    whole = of_a_run(values) if is_of_arguments else frozenset[str]()
    return Configuration(origin=f"{name}, {vocabulary.value}", vocabulary=vocabulary, values=values, whole=whole)


def _mappings(data: object, depth: int = 0) -> Iterator[Mapping[str, object]]:
    if isinstance(data, Mapping) and depth < _DEEPEST:
        yield data
        for value in data.values():
            yield from _mappings(value, depth + 1)


def _leaves(data: Mapping[str, object], depth: int = 0) -> Iterator[tuple[str, object]]:
    """Yield each key that has a value, wherever it is: sections of Megatron's YAML do not share keys but for those that agree."""
    for key, value in data.items():
        if isinstance(value, Mapping) and value and depth < _DEEPEST:
            yield from _leaves(value, depth + 1)
        else:
            yield str(key).lstrip("-").replace("-", "_"), value
