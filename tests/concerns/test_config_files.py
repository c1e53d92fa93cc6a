"""Configuration files of every kind: the features of a model that each decides, and those that it leaves open."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from megacpp_overlays.concerns.config_files import read
from megacpp_overlays.concerns.features import FEATURES
from megacpp_overlays.concerns.predicates import Ternary, of_feature
from megacpp_overlays.errors import ConfigurationError

CONFIGS = Path(__file__).parent / "configs"
Answers = dict[str, set[str]]


@pytest.fixture
def answers(tmp_path: Path) -> Callable[..., Answers]:
    """The features that a text in a file shows, rules out and leaves open."""

    def of(text: str | Path, name: str = "train.sh") -> Answers:
        path = text if isinstance(text, Path) else tmp_path / name
        if isinstance(text, str):
            path.write_text(textwrap.dedent(text))
        found = read(path)
        return {each.value: {one.name for one in FEATURES if of_feature(one, found) is each} for each in Ternary}

    return of


# --- a shell script ---

SCRIPT = """
    #!/bin/bash
    GPUS_PER_NODE=8
    MASTER_ADDR=${MASTER_ADDR:-"localhost"}   # it's of the cluster
    DATA_PATH=$1
    DISTRIBUTED_ARGS=(--nproc_per_node $GPUS_PER_NODE --master_addr $MASTER_ADDR)
    MODEL_ARGS=(
        --num-layers 61          # don't change
        --multi-latent-attention
        --num-experts 256 --moe-router-load-balancing-type seq_aux_loss
        --moe-router-enable-expert-bias
    )
    TRAINING_ARGS="--bf16 --use-distributed-optimizer \\
        --no-rope-fusion --data-path $DATA_PATH"
    torchrun ${DISTRIBUTED_ARGS[@]} $MEGATRON/pretrain_gpt.py \\
        ${MODEL_ARGS[@]} \\
        ${TRAINING_ARGS} --tensor-model-parallel-size=8 --sequence-parallel
"""


def test_a_script_of_megatron_lm_decides_all_but_packing(answers: Callable[..., Answers]) -> None:
    found = answers(SCRIPT)

    assert found["yes"] == {
        *("mla", "experts", "seq_aux_loss", "expert_bias", "half", "distributed_optimizer"),
        *("tensor_parallel", "sequence_parallel"),
    }
    assert found["undecided"] == {"packed"}


@pytest.mark.parametrize(
    ("old", "new", "open_ones"),
    [
        ("--sequence-parallel", "--sequence-parallel ${EXTRA_ARGS}", {"qk_clip", "dsa", "mamba", "context_parallel"}),
        ("--sequence-parallel", '"$@"', {"qk_clip", "dsa", "sequence_parallel"}),
        ("pretrain_gpt.py", "pretrain_ours.py", {"qk_clip", "dsa", "mamba", "liger_loss"}),
        ("--sequence-parallel", "--use-checkpoint-args", {"qk_clip", "mtp", "tensor_parallel"}),
        ("--sequence-parallel", "--spec ours.layers spec", {"dsa", "mamba", "mamba3", "gated_delta"}),
        ("size=8", "size=$TP", {"tensor_parallel"}),
        ("size=8", "size ${TP:-8}", {"tensor_parallel"}),
    ],
)
def test_values_that_a_script_leaves_to_others_are_open(
    answers: Callable[..., Answers], old: str, new: str, open_ones: set[str]
) -> None:
    assert SCRIPT.count(old) == 1

    found = answers(SCRIPT.replace(old, new))

    assert open_ones <= found["undecided"]
    assert "mla" not in found["no"]


@pytest.mark.parametrize(
    "body",
    [
        "if [ $BIG = 1 ]; then TP=4; fi",
        "case $SIZE in\n big)\n TP=1\n ;;\n small)\n TP=4 ;;\nesac",
        "test -f big && TP=1",
        "TP=1\nTP=4",
        "set_it() {\n TP=1\n}",
        "TP=$(nproc)",
    ],
)
def test_a_variable_that_a_condition_sets_is_open(answers: Callable[..., Answers], body: str) -> None:
    found = answers(f"{body}\npython pretrain_gpt.py --bf16 --tensor-model-parallel-size $TP\n")

    assert "tensor_parallel" in found["undecided"]
    assert "qk_clip" in found["no"], "the rest is known"


def test_an_argument_that_a_condition_adds_is_open_and_one_that_is_there_anyway_is_not(
    answers: Callable[..., Answers],
) -> None:
    found = answers(
        """
        ARGS=(--bf16 --multi-latent-attention)
        if [ "$CLIP" = 1 ]; then
            ARGS=("${ARGS[@]}" --qk-clip)
        fi
        python pretrain_gpt.py "${ARGS[@]}"
        """
    )

    assert {"mla", "half"} <= found["yes"]
    assert {"packed", "qk_clip"} == found["undecided"]


def test_only_values_that_both_runs_of_a_script_share_decide(answers: Callable[..., Answers]) -> None:
    found = answers(
        "python pretrain_gpt.py --bf16 --num-experts 8\npython pretrain_gpt.py --bf16 --context-parallel-size 2\n"
    )

    assert found["yes"] == {"half", "rope_fusion"}
    assert {"experts", "context_parallel"} <= found["undecided"]


def test_layers_of_a_hybrid_model_are_in_its_pattern(answers: Callable[..., Answers]) -> None:
    found = answers('python pretrain_hybrid.py --hybrid-layer-pattern "M-M*E+G/MM" --bf16\n')

    assert {"hybrid", "mamba_mixer", "mamba", "mla", "gated_delta", "mtp"} <= found["yes"]
    assert {"dsa", "liger_loss", "tensor_parallel"} <= found["no"]


def test_a_script_whose_quotes_do_not_end_is_refused(answers: Callable[..., Answers]) -> None:
    with pytest.raises(ConfigurationError, match=r"train\.sh is not understood \(a double quote is not closed\)"):
        answers('python pretrain_gpt.py --bf16 "\n')


# --- arguments and configurations as data ---

FLAGS = "--bf16 --num-experts 8\n--tensor-model-parallel-size 2\n"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (FLAGS, "args.txt"),
        (json.dumps(FLAGS.split()), "args.json"),
        ("MODEL_ARGS:\n  --bf16: true\n  --num-experts: 8\n  --tensor-model-parallel-size: 2\n", "model_config.yaml"),
    ],
)
def test_arguments_without_a_launcher_decide_features_that_no_launcher_changes(
    answers: Callable[..., Answers], text: str, name: str
) -> None:
    found = answers(text, name)

    assert found["yes"] == {"half", "experts", "tensor_parallel", "rope_fusion"}
    of_a_launcher = {"hybrid", "mamba", "mamba_mixer", "mamba3", "megatron_fsdp", "torch_fsdp2", "conversations"}
    assert found["undecided"] == {"packed", "liger_loss", *of_a_launcher}


YAML = """
    language_model:
      num_moe_experts: 8
      recompute_granularity: null
      multi_latent_attention: False
      softmax_type: vanilla
    model_parallel:
      tensor_model_parallel_size: 1
      context_parallel_size: 1
      bf16: True
    optimizer:
      use_distributed_optimizer: true
    micro_batch_size: 2
"""


def test_a_yaml_of_megatron_decides_its_features(answers: Callable[..., Answers]) -> None:
    found = answers(YAML, "gpt_config.yaml")

    assert found["yes"] == {"experts", "half", "distributed_optimizer"}
    assert found["no"] == {"recompute", "mla", "attention_sinks", "tensor_parallel"}


def test_precision_that_a_recipe_sets_is_open(answers: Callable[..., Answers]) -> None:
    text = "model:\n  bf16: false\n  fp16: false\n  params_dtype: torch.float32\n"

    assert "half" in answers(text, "run_config.yaml")["no"]
    assert "half" in answers(f"{text}mixed_precision: bf16_mixed\n", "run_config.yaml")["undecided"]


def test_arguments_in_a_log_decide_their_features(answers: Callable[..., Answers]) -> None:
    shown = {"qk_clip": "False", "num_experts": "None", "bf16": "True", "cuda_graph_impl": "none"}
    rows = "\n".join(f" 0:   {key} {'.' * (40 - len(key))} {value}" for key, value in shown.items())
    few = f"------------------------ arguments ------------------------\n{rows}\n" + "  lr ........ 0.1\n" * 10
    many = few + "".join(f"  option_{number} ........ None\n" for number in range(400))

    assert answers(few, "run.log")["no"] == {"qk_clip", "experts"}
    assert {"qk_clip", "experts", "local_graphs", "mla", "dsa", "optimizer_offload"} <= answers(many, "run.log")["no"]
    assert {"mamba", "packed", "liger_loss", "hybrid"} <= answers(many, "run.log")["undecided"]


def test_a_repr_decides_its_features(answers: Callable[..., Answers]) -> None:
    text = (
        "MLATransformerConfig(tensor_model_parallel_size=4, init_method=<function init_(std=0.02, a='b)') at 0x7f>, bf16=True, "
        "params_dtype=torch.bfloat16, cuda_graph_modules=[<A.attn: 1>, 'x, y'], qk_clip=False, fp16=False, ...)"
    )

    found = answers(text, "config.txt")

    assert found["yes"] == {"mla", "tensor_parallel", "half"}
    assert found["no"] == {"qk_clip"}


# --- models of transformers ---


@pytest.mark.parametrize(
    ("model", "yes", "no"),
    [
        ("deepseek_v3", {"mla", "experts", "mtp"}, {"dsa", "mamba", "mamba_mixer", "mamba3", "gated_delta", "hybrid", "attention_sinks"}),
        ("deepseek_v32", {"mla", "dsa", "experts"}, {"mamba", "mamba_mixer", "mamba3", "gated_delta", "hybrid", "attention_sinks"}),
        ("qwen3_moe", {"experts"}, {"mla", "dsa", "mamba", "mamba_mixer", "mamba3", "gated_delta", "hybrid", "attention_sinks"}),
        ("llama", set(), {"mla", "dsa", "mamba", "mamba_mixer", "mamba3", "gated_delta", "hybrid", "attention_sinks", "experts"}),
        ("nemotron_h", {"mamba", "experts"}, {"mla", "dsa", "mamba3", "gated_delta", "attention_sinks"}),
        ("qwen3_next", {"gated_delta", "experts"}, {"mla", "dsa", "mamba", "mamba_mixer", "mamba3", "attention_sinks"}),
    ],
)  # fmt: skip
def test_a_model_of_transformers_decides_its_architecture_and_nothing_of_its_training(
    answers: Callable[..., Answers], model: str, yes: set[str], no: set[str]
) -> None:
    """The files are as transformers 5.23.0 writes the configuration classes of these models, with fewer keys."""
    found = answers(CONFIGS / f"{model}.json")

    assert (found["yes"], found["no"]) == (yes, no)


@pytest.mark.parametrize(("model", "has_experts"), [("mixtral", True), ("gpt_oss", True), ("llama", False)])
def test_without_a_number_of_experts_the_type_of_a_model_says_whether_it_has_any(
    answers: Callable[..., Answers], model: str, has_experts: bool
) -> None:
    """By the defaults of the configuration classes of transformers 5.23.0."""
    found = answers(json.dumps({"model_type": model}), "config.json")

    assert ("experts" in found["yes"], "experts" in found["no"]) == (has_experts, not has_experts)


def test_a_model_of_a_type_that_is_not_known_is_ruled_nothing_out(answers: Callable[..., Answers]) -> None:
    found = answers(json.dumps({"model_type": "tomorrow", "kv_lora_rank": 512, "num_experts": 4}), "config.json")

    assert found["yes"] == {"mla", "experts"}
    assert found["no"] == set()


# --- files that are no configuration ---


@pytest.mark.parametrize(
    ("text", "name", "says"),
    [
        ("hello", "notes.txt", "nothing of a configuration is in it"),
        ("[1, 2]", "a.json", "it holds no mapping of keys"),
        ("{'a': 1", "a.json", "Expecting property name"),
        ("a: [", "a.yaml", "while parsing"),
        ("", "empty.yaml", "it holds no mapping of keys"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused_with_the_kinds_that_are(
    tmp_path: Path, text: str, name: str, says: str
) -> None:
    (tmp_path / name).write_text(text)

    with pytest.raises(ConfigurationError, match=r"config\.json of a model of transformers") as refused:
        read(tmp_path / name)

    assert says in str(refused.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read \\(No such file or directory\\)"):
        read(tmp_path / "nothing.sh")
