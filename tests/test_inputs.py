"""Configurations in place of a script: the arguments they stand for, and the models they describe."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hapmoe.counting import count_params
from hapmoe.errors import HapmoeError, InputError, Unsupported
from hapmoe.extract import extract, extract_document
from hapmoe.inputs import read_input
from hapmoe.inputs.hugging_face import FAMILIES

BASE: dict[str, Any] = {"hidden_act": "silu", "torch_dtype": "bfloat16", "max_position_embeddings": 32768}


def _shape(kind: str, layers: int, hidden: int, ffn: int, heads: int, groups: int, vocab: int, **more: Any) -> Any:
    return {
        **BASE,
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": vocab,
        **more,
    }


def _latent(kind: str, layers: int, hidden: int, ffn: int, heads: int, vocab: int, **more: Any) -> Any:
    return _shape(
        kind, layers, hidden, ffn, heads, heads, vocab,
        kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, moe_layer_freq=1, **more,
    )  # fmt: skip


# Parameters: the sum over the tensors of the published checkpoints, multi-token prediction left out.
MODELS: dict[str, tuple[Any, float, float]] = {
    "llama-3-8b": (_shape("llama", 32, 4096, 14336, 32, 8, 128256), 8.030261248, 1e-6),
    "llama-3.2-1b": (
        _shape("llama", 16, 2048, 8192, 32, 8, 128256, head_dim=64, tie_word_embeddings=True), 1.235814400, 1e-6,
    ),
    "mistral-7b": (_shape("mistral", 32, 4096, 14336, 32, 8, 32000, sliding_window=4096), 7.241732096, 1e-6),
    "qwen2-7b": (_shape("qwen2", 28, 3584, 18944, 28, 4, 152064, use_sliding_window=False), 7.615616512, 1e-6),
    "qwen3-8b": (_shape("qwen3", 36, 4096, 12288, 32, 8, 151936, head_dim=128), 8.190735360, 1e-6),
    "mixtral-8x7b": (
        _shape("mixtral", 32, 4096, 14336, 32, 8, 32000, num_local_experts=8, num_experts_per_tok=2),
        46.702792704, 1e-6,
    ),
    "qwen2-57b-a14b": (
        _shape("qwen2_moe", 28, 3584, 18944, 28, 4, 151936, num_experts=64, num_experts_per_tok=8,
               moe_intermediate_size=2560, shared_expert_intermediate_size=20480, decoder_sparse_step=1,
               mlp_only_layers=[]),
        57.409011200, 1e-5,
    ),
    "qwen3-30b-a3b": (
        _shape("qwen3_moe", 48, 2048, 6144, 32, 4, 151936, head_dim=128, num_experts=128, num_experts_per_tok=8,
               moe_intermediate_size=768, decoder_sparse_step=1, mlp_only_layers=[]),
        30.532122624, 1e-6,
    ),
    "qwen3-235b-a22b": (
        _shape("qwen3_moe", 94, 4096, 12288, 64, 4, 151936, head_dim=128, num_experts=128, num_experts_per_tok=8,
               moe_intermediate_size=1536, decoder_sparse_step=1, mlp_only_layers=[]),
        235.093634560, 1e-6,
    ),
    "deepseek-v2": (
        _latent("deepseek_v2", 60, 5120, 12288, 128, 102400, q_lora_rank=1536, n_routed_experts=160,
                n_shared_experts=2, num_experts_per_tok=6, moe_intermediate_size=1536, first_k_dense_replace=1),
        235.741434880, 1e-4,
    ),
    "deepseek-v2-lite": (
        _latent("deepseek_v2", 27, 2048, 10944, 16, 102400, q_lora_rank=None, n_routed_experts=64,
                n_shared_experts=2, num_experts_per_tok=6, moe_intermediate_size=1408, first_k_dense_replace=1),
        15.706484224, 1e-4,
    ),
    "deepseek-v3": (
        _latent("deepseek_v3", 61, 7168, 18432, 128, 129280, q_lora_rank=1536, n_routed_experts=256,
                n_shared_experts=1, num_experts_per_tok=8, moe_intermediate_size=2048, first_k_dense_replace=3),
        671.026419200, 1e-4,
    ),
    "kimi-k2": (
        _latent("kimi_k2", 61, 7168, 18432, 64, 163840, q_lora_rank=1536, n_routed_experts=384,
                n_shared_experts=1, num_experts_per_tok=8, moe_intermediate_size=2048, first_k_dense_replace=1),
        1026.4, 1e-3,
    ),
    "gpt-oss-20b": (
        _shape("gpt_oss", 24, 2880, 2880, 64, 8, 201088, head_dim=64, num_local_experts=32, num_experts_per_tok=4,
               attention_bias=True, sliding_window=128,
               layer_types=["sliding_attention", "full_attention"] * 12),
        20.914757184, 1e-4,
    ),
    "gpt-oss-120b": (
        _shape("gpt_oss", 36, 2880, 2880, 64, 8, 201088, head_dim=64, num_local_experts=128, num_experts_per_tok=4,
               attention_bias=True, sliding_window=128),
        116.829156672, 1e-4,
    ),
    "olmoe-1b-7b": (
        _shape("olmoe", 16, 2048, 1024, 16, 16, 50304, num_experts=64, num_experts_per_tok=8), 6.919161856, 1e-4,
    ),
    "glm-4.5-air": (
        _shape("glm4_moe", 46, 4096, 10944, 96, 8, 151552, head_dim=128, n_routed_experts=128, n_shared_experts=1,
               num_experts_per_tok=8, moe_intermediate_size=1408, first_k_dense_replace=1, attention_bias=True),
        106.85, 2e-3,
    ),
    "glm-4.5": (
        _shape("glm4_moe", 92, 5120, 12288, 96, 8, 151552, head_dim=128, n_routed_experts=160, n_shared_experts=1,
               num_experts_per_tok=8, moe_intermediate_size=1536, first_k_dense_replace=3, attention_bias=True,
               use_qk_norm=True),
        352.8, 2e-3,
    ),
}  # fmt: skip
OPTIONS = ("--seq-length", "4096", "--micro-batch-size", "1", "--global-batch-size", "256")


def _config(folder: Path, config: Mapping[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("name", MODELS)
def test_published_sizes(name: str, tmp_path: Path) -> None:
    config, billions, tolerance = MODELS[name]
    job = extract(_config(tmp_path, config), OPTIONS)
    assert count_params(job.model, mtp=False) / 1e9 == pytest.approx(billions, rel=tolerance)


def test_config_json_is_a_job_with_options_behind_it(tmp_path: Path) -> None:
    path = _config(tmp_path, MODELS["gpt-oss-20b"][0])
    job = extract(path, (*OPTIONS, "--data-path", "/d"))
    assert (job.training.seq_len, job.training.global_batch_size, job.entry) == (4096, 256, "pretrain_gpt.py")
    assert job.model.attention_window == 128 and job.model.window_pattern == (True, False) * 12
    assert job.model.linear_bias and job.model.moe is not None and job.model.moe.top_k == 4
    assert job.origin["model.hidden"].endswith("config.json: hidden_size")
    with pytest.raises(InputError, match="--seq-length"):
        extract(path)
    half = extract(_config(tmp_path, MODELS["llama-3-8b"][0] | {"torch_dtype": "float16"}), OPTIONS)
    assert half.training.precision == "fp16"


def test_dense_and_shared_layers(tmp_path: Path) -> None:
    job = extract(_config(tmp_path, MODELS["deepseek-v3"][0] | {"num_nextn_predict_layers": 1}), OPTIONS)
    assert job.model.mtp_layers == 1
    assert job.model.moe is not None and job.model.moe.pattern == (False,) * 3 + (True,) * 58
    grouped = MODELS["deepseek-v3"][0] | {"n_group": 8, "topk_group": 4}
    routed = extract(_config(tmp_path, grouped), OPTIONS).model.moe
    assert routed is not None and (routed.router_groups, routed.group_top_k) == (8, 4)
    sparse = MODELS["qwen3-30b-a3b"][0] | {"decoder_sparse_step": 2, "mlp_only_layers": [1]}
    moe = extract(_config(tmp_path, sparse), OPTIONS).model.moe
    assert moe is not None
    assert moe.pattern == tuple((place + 1) % 2 == 0 and place != 1 for place in range(48))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba2"}, "not read"),
        ({"vision_config": {}}, "not read"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"num_hidden_layers": "32"}, "whole number"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": True}, "whole number"),
        ({"attention_bias": True}, "output projection"),
        ({"mlp_bias": True}, "mlp_bias"),
    ],
)
def test_refused_configurations(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises((InputError, Unsupported), match=message) as caught:
        extract(_config(tmp_path, MODELS["llama-3-8b"][0] | change), OPTIONS)
    assert "config.json" in str(caught.value) and "\n" not in str(caught.value)


def test_every_family_is_tried() -> None:
    assert {config["model_type"] for config, _, _ in MODELS.values()} == set(FAMILIES)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "{", "JSON"),
        ("a.json", '{"a": 1}', "config.json"),
        ("a.json", "[" * 100_000, "JSON"),
        ("a.yaml", "a: 1\n", "no known kind"),
        ("a.yaml", "a: [1\n", "not YAML"),
        ("a.yaml", "", "empty"),
        ("a.yaml", "a: " + "[" * 500, "nested"),
        ("a.yaml", "pools: []\n", "--cluster"),
        ("a.yaml", "MODEL_ARGS:\n  --x: {a: 1}\n", "mapping"),
        ("a.yaml", "MODEL_ARGS:\n  x: 1\n", "no flag"),
        ("a.yaml", "experiment: {task: {type: inference, backend: vllm}}\n", "not a training"),
        ("a.yaml", "experiment: {a: 1}\ndefaults: [{train: gone}]\n", "not here"),
        ("a.yaml", "experiment: {a: 1}\n", "no train configuration"),
    ],
)
def test_unusable_files(name: str, text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(HapmoeError, match=message) as caught:
        extract(path, OPTIONS)
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="no such file"):
        extract(tmp_path / f"gone{path.suffix}")


MODEL_CONFIG = """\
ENV_VARS:
  CUDA_DEVICE_MAX_CONNECTIONS: 1
  HF_TOKEN: abc
MODEL_ARGS:
  --num-layers: 12
  --hidden-size: 512
  --num-attention-heads: 8
  --tensor-model-parallel-size: ${TP}
  --sequence-parallel: true
  --seq-length: 1024
  --max-position-embeddings: 1024
  --micro-batch-size: 4
  --global-batch-size: 32
  --lr: .00015
  --weight-decay: 1e-2
  --num-experts: 8
  --moe-layer-freq: ([0]*1+[1]*11)
  --data-path: ${DATA}/a_document
  --save: ${SAVE}
  --cp-comm-type: [p2p a2a]
  --split: "949,50,1"
  --wandb-project: a b
  --tiktoken-pattern: ""
  --bf16: true
"""


def test_model_args(tmp_path: Path) -> None:
    path = tmp_path / "model_config.yaml"
    path.write_text(MODEL_CONFIG)
    read = read_input(path, ("--vocab-size", "32000", "--wandb-key", "secret1"), {"TP": "2"})
    words = [token.text for token in read.argv]
    assert words[words.index("--lr") + 1] == ".00015" and words[words.index("--weight-decay") + 1] == "1e-2"
    assert words[words.index("--cp-comm-type") : words.index("--cp-comm-type") + 4] == [
        "--cp-comm-type", "p2p", "a2a", "--split",
    ]  # fmt: skip
    assert words[words.index("--wandb-project") + 1] == "a b" and "--tiktoken-pattern" not in words
    unknown = {token.source for token in read.argv if token.text is None}
    assert unknown == {'"${DATA:?}/a_document"', "SAVE", ""}
    assert "secret1" not in repr(read) and "abc" not in repr(read)
    job = extract(path, ("--vocab-size", "32000"), {"TP": "2", "GPUS_PER_NODE": "4", "NUM_NODES": "2"})
    assert (job.present.tp, job.present.world_size, job.model.vocab_size) == (2, 8, 32000)
    assert job.origin["model.hidden"].endswith("model_config.yaml:6")
    _, document = extract_document(path)
    assert "TP is not given" in document["refused"]


TRAIN = """\
system:
  tensor_model_parallel_size: 2
  precision:
    bf16: true
    fp16: false
  checkpoint: {save_interval: "${experiment.save_steps}"}
model:
  num_layers: 4
  hidden_size: 1024
  num_attention_heads: 8
  seq_length: 512
  max_position_embeddings: 512
  swiglu: true
  multiple_of: 256
  micro_batch_size: 2
  global_batch_size: 16
  optimizer: {lr_scheduler: {lr: 2.0e-5, min_lr: 1e-6}}
  profile_ranks: [0, 7]
data:
  data_path: ${data_path:??}
  tokenizer: {tokenizer_type: AquilaTokenizerFS, vocab_size: 100008}
"""
EXPERIMENT = """\
defaults:
  - train: 7b
  - _self_
experiment:
  exp_name: e1
  save_steps: 2000
  task: {type: train, backend: megatron, entrypoint: ./flagscale/train/train_gpt.py}
  runner: {backend: torchrun, nnodes: 2, nproc_per_node: 8}
  envs: {CUDA_DEVICE_MAX_CONNECTIONS: 1}
"""


def test_flagscale(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train/7b.yaml").write_text(TRAIN)
    path = tmp_path / "train.yaml"
    path.write_text(EXPERIMENT)
    read = read_input(path, ("train.model.num_layers=8", "--num-experts", "4"))
    words = [token.text for token in read.argv]
    assert words[:6] == ["--tensor-model-parallel-size", "2", "--bf16", "--save-interval", "2000", "--num-layers"]
    assert words[6] == "8" and "--fp16" not in words and words[-2:] == ["--num-experts", "4"]
    assert words[words.index("--lr") + 1] == "2e-05" and words[words.index("--min-lr") + 1] == "1e-06"
    assert words[words.index("--profile-ranks") : words.index("--profile-ranks") + 3] == ["--profile-ranks", "0", "7"]
    assert (read.world_size, read.nodes, read.devices_per_node) == (16, 2, 8)
    assert [(name, token.text) for name, token in read.env] == [("CUDA_DEVICE_MAX_CONNECTIONS", "1")]
    job = extract(path)
    assert job.model.ffn_hidden == 2816 and job.model.vocab_size == 100008 and job.entry.endswith("train_gpt.py")
    alone = extract(tmp_path / "train/7b.yaml")
    assert (alone.model.num_layers, alone.present.world_size) == (4, None)


def test_megatron_yaml(tmp_path: Path) -> None:
    path = tmp_path / "gpt_config.yaml"
    path.write_text(
        "language_model:\n  num_layers: 24\n  hidden_size: 1024\n  num_attention_heads: 16\n  num_query_groups: 4\n"
        "  activation_func: swiglu\n  add_bias_linear: False\n  num_moe_experts: 8\n  moe_router_topk: 1\n"
        "  ffn_hidden_size: null\n  window_size: null\nmodel_parallel:\n  tensor_model_parallel_size: 2\n  bf16: True\n"
        "  virtual_pipeline_model_parallel_size: null\n  timers: null\n  overlap_p2p_comm: False\n"
        "micro_batch_size: 2\nglobal_batch_size: 128\nrampup_batch_size: [32, 32, 65324160]\nseq_length: 4096\n"
        "max_position_embeddings: 4096\nposition_embedding_type: rope\nuntie_embeddings_and_output_weights: True\n"
        "add_position_embedding: False\nbias_swiglu_fusion: False\n"
    )
    job = extract(path, ("--vocab-size", "32000"))
    model = job.model
    assert (model.num_kv_heads, model.gated, model.linear_bias, model.tied_embeddings) == (4, True, False, False)
    assert model.moe is not None and (model.moe.num_experts, model.moe.top_k) == (8, 1)
    assert (job.present.tp, job.training.precision, job.training.overlap_p2p) == (2, "bf16", False)
    words = [word.text for word in job.argv]
    assert "--no-bias-swiglu-fusion" in words and words.count("--rampup-batch-size") == 1


def test_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--nproc_per_node", "8", "pretrain_gpt.py", "--num-layers", "4", "--name", "a b;$X"]
    read = read_input("torchrun", words)
    assert [token.text for token in read.argv] == words[3:]
    assert (read.world_size, read.program) == (8, "pretrain_gpt.py")
    prefixed = read_input("A=b c", ["python", "pretrain_gpt.py", "--num-layers", "4"])
    assert [(name, token.text) for name, token in prefixed.env] == [("A", "b c")]
    Path("t.sh").write_text("torchrun pretrain_gpt.py --num-layers $1\n")
    assert [token.text for token in read_input("bash", ["t.sh", "7"]).argv] == ["--num-layers", "7"]
    assert [token.text for token in read_input("t.sh", ["7"]).argv] == ["--num-layers", "7"]
