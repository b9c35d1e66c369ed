"""Argument vectors against what Megatron itself establishes: its defaults, its refusals, published sizes."""

from __future__ import annotations

import warnings

import pytest
from argv_words import SHAPE, tokens

from hapmoe.errors import InputError, Unsupported
from hapmoe.model import ModelSpec, Moe
from hapmoe.script.megatron_args import Allocation, ReadArguments, read_arguments


def read(extra: str = "", shape: str = SHAPE, **options: object) -> ReadArguments:
    return read_arguments(tokens(f"{shape} {extra}"), where="t.sh:99", **options)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------- shape


def test_defaults_are_those_of_transformer_config() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

        dense = TransformerConfig(num_layers=8, hidden_size=1024, num_attention_heads=16)
        moe = TransformerConfig(num_layers=8, hidden_size=1024, num_attention_heads=16, num_moe_experts=4)
        mla = MLATransformerConfig(num_layers=8, hidden_size=1024, num_attention_heads=16, q_lora_rank=None)
    model = read().model
    assert (model.ffn_hidden, model.head_dim, model.num_kv_heads, model.linear_bias, model.gated) == (
        dense.ffn_hidden_size,
        dense.kv_channels,
        dense.num_query_groups,
        dense.add_bias_linear,
        dense.gated_linear_unit,
    )
    assert model.layernorm_bias == (dense.normalization == "LayerNorm")
    got = read("--num-experts 4")
    assert got.model.moe is not None
    assert (got.model.moe.ffn_hidden, got.model.moe.top_k) == (moe.ffn_hidden_size, moe.moe_router_topk)
    assert got.training.dispatcher == moe.moe_token_dispatcher_type
    assert got.model.moe.pattern == (True,) * 8
    latent = read("--multi-latent-attention").model.mla
    assert latent is not None
    # The parser's default of kv-lora-rank is 32, the class's is 512: the parser wins (arguments.py, --kv-lora-rank).
    assert (latent.qk_nope, latent.qk_rope, latent.v, latent.kv_lora, latent.q_lora) == (
        mla.qk_head_dim,
        mla.qk_pos_emb_head_dim,
        mla.v_head_dim,
        32,
        None,
    )


@pytest.mark.parametrize(
    ("extra", "ffn"),
    [("", 4096), ("--swiglu", 2688), ("--quick-geglu", 4096), ("--swiglu --ffn-hidden-size 2816", 2816)],
)
def test_ffn_width(extra: str, ffn: int) -> None:
    assert read(extra).model.ffn_hidden == ffn  # int(4*1024*2/3/64)*64 = 2688


def test_query_groups_without_the_switch_are_ignored_and_said() -> None:
    got = read("--num-query-groups 4")
    assert got.model.num_kv_heads == 16
    assert any("t.sh:12" in note and "no effect" in note for note in got.notes)
    assert read("--num-query-groups 4 --group-query-attention").model.num_kv_heads == 4
    assert read("--group-query-attention").model.num_kv_heads == 1


def test_last_occurrence_counts_in_every_spelling() -> None:
    got = read("--num-layers=12 --hidden-size 2048 --num_layers 16")
    assert (got.model.num_layers, got.model.hidden) == (16, 2048)
    assert got.origin["model.num_layers"] == "t.sh:15"
    assert any("given more than once" in note for note in got.notes)


def test_biases_and_positions() -> None:
    assert read().model.qkv_bias and read().model.learned_positions == 2048
    plain = read("--disable-bias-linear --position-embedding-type rope").model
    assert (plain.linear_bias, plain.qkv_bias, plain.learned_positions) == (False, False, 0)
    assert read("--disable-bias-linear --add-qkv-bias").model.qkv_bias
    assert read("--use-rotary-position-embeddings").model.learned_positions == 0


def test_windows() -> None:
    model = read("--window-size 127,0 --window-attn-skip-freq 4").model
    assert model.attention_window == 128
    assert model.window_pattern == (True, True, True, False) * 2
    assert read("--window-size (-1,0)").model.attention_window is None


def test_vocabulary() -> None:
    assert read("--vocab-size 50257").model.padded_vocab(2) == 50432
    assert read("--padded-vocab-size 50304").model.padded_vocab(8) == 50304
    assert read("--vocab-size 50257 --make-vocab-size-divisible-by 64").model.padded_vocab(1) == 50304
    assert read("--vocab-size 32001 --no-pad-vocab-size").model.padded_vocab(4) == 32001
    unknown = read("--tokenizer-type GPT2BPETokenizer")
    assert unknown.model.vocab_size == 0
    assert any("50257" in note for note in unknown.notes)
    told = read("--padded-vocab-size 50304", vocab_size=32000)
    assert (told.model.vocab_size, told.model.padded_vocab_size) == (32000, None)
    assert told.origin["model.vocab_size"] == "option --vocab-size"


# ----------------------------------------------------------------------------------- layer patterns


def test_frequency_and_list_of_expert_layers() -> None:
    def pattern(extra: str) -> tuple[bool, ...]:
        moe = read(f"--num-experts 4 {extra}").model.moe
        assert moe is not None
        return moe.pattern

    assert pattern("--moe-layer-freq 2") == (True, False) * 4
    assert pattern("--moe-layer-freq ([0]*3+[1]*5)") == (False,) * 3 + (True,) * 5
    assert pattern("--first-k-dense-replace 3") == (False,) * 3 + (True,) * 5
    with pytest.raises(InputError, match="lists 7 layers"):
        pattern("--moe-layer-freq [1]*7")
    with pytest.raises(InputError, match="quotes"):
        pattern("--moe-layer-freq '[1]*8'")


def test_layers_that_do_nothing() -> None:
    """MindSpeed's docs/features/noop-layers.md: 128 layers of which 0 and 127 do nothing are 126 layers; the split is
    the even one of all, and first-k-dense-replace counts all (MindSpeed-LLM, core/transformer/transformer_block.py)."""
    job = read("--num-layers 128 --noop-layers 0,127 --pipeline-model-parallel-size 4")
    assert job.model.num_layers == 126
    assert job.present.layout == "Et*31|t*32|t*32|t*31L"
    words = {word.text: word.owner for word in job.argv}
    assert words["126"] == "user"
    assert words["--noop-layers"] == words["0,127"] == "plan"
    assert "128" not in words
    assert any("2 of 128 layers do nothing" in note for note in job.notes)
    assert any("--noop-layers is of a fork" in note for note in job.notes)
    assert job.origin["present.layout"] == "t.sh:14"  # the word "0,127"

    job = read("--noop-layers 7 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2")
    assert (job.present.layout, job.present.vpp) == ("Et*2|t*2|t*2|t*1L", 2)
    job = read("--noop-layers 0,7 --pipeline-model-parallel-size 2 --schedules-method dualpipev")
    assert (job.present.layout, job.present.vpp) == ("Et*2|t*4L", 1)
    assert read("--noop-layers 3").present.layout is None
    assert read("--noop-layers None").model.num_layers == 8

    def pattern(extra: str) -> tuple[tuple[bool, ...], list[str | None]]:
        read_ = read(f"--num-experts 4 {extra}")
        assert read_.model.moe is not None
        return read_.model.moe.pattern, [word.text for word in read_.argv]

    experts, words_ = pattern("--noop-layers 0,6 --first-k-dense-replace=3")
    assert experts == (False,) * 2 + (True,) * 4
    assert "--first-k-dense-replace=2" in words_
    assert pattern("--noop-layers 0,6 --moe-layer-freq -1")[0] == (True,) * 6  # as MindSpeed-LLM writes "every"
    experts, words_ = pattern("--noop-layers 0,6 --moe-layer-freq ([0]*3+[1]*5)")
    assert experts == (False,) * 2 + (True,) * 4
    assert "[0,0,1,1,1,1]" in words_


@pytest.mark.parametrize(
    "extra",
    [
        "--noop-layers 8",
        "--noop-layers 1,,2",
        "--noop-layers -1",
        "--noop-layers 0,1,2,3,4,5,6,7",
        "--noop-layers 1 --pipeline-model-parallel-size 3",
        "--noop-layers 1 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3",
        "--noop-layers 1 --pipeline-model-parallel-layout Et*3|t*4L --pipeline-model-parallel-size 2",
        "--noop-layers 1 --num-experts 4 --moe-layer-freq 2",
    ],
)
def test_layers_that_do_nothing_and_cannot_be_read(extra: str) -> None:
    with pytest.raises((InputError, Unsupported), match="noop-layers"):
        read(extra)


# ------------------------------------------------------------------------------ published parameter counts


def _params(model: ModelSpec, experts: int) -> float:
    """Parameters with ``experts`` of each MoE layer, written down from the layers' shapes; norms left out."""
    hidden, heads = model.hidden, model.num_heads
    if model.mla:
        mla = model.mla
        q = (
            hidden * heads * (mla.qk_nope + mla.qk_rope)
            if mla.q_lora is None
            else (hidden * mla.q_lora + mla.q_lora * heads * (mla.qk_nope + mla.qk_rope))
        )
        kv = hidden * (mla.kv_lora + mla.qk_rope) + mla.kv_lora * heads * (mla.qk_nope + mla.v)
        attention = q + kv + heads * mla.v * hidden
    else:
        attention = hidden * model.head_dim * (heads + 2 * model.num_kv_heads) + heads * model.head_dim * hidden
    matrices = 3 if model.gated else 2
    total = float(model.vocab_size * hidden * (1 if model.tied_embeddings else 2))
    for is_moe in model.moe_pattern:
        moe = model.moe
        width = model.ffn_hidden
        router = 0
        if is_moe and moe:
            width, router = moe.ffn_hidden * experts + moe.shared_ffn_hidden, hidden * moe.num_experts
        total += attention + matrices * hidden * width + router
    return total / 1e9


MIXTRAL = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --seq-length 4096 --max-position-embeddings 32768 --position-embedding-type rope --swiglu "
    "--disable-bias-linear --untie-embeddings-and-output-weights --num-experts 8 --vocab-size 32000"
)
DEEPSEEK = (
    "--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --multi-latent-attention "
    "--q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --swiglu "
    "--disable-bias-linear --untie-embeddings-and-output-weights --num-experts 256 --moe-router-topk 8 "
    "--moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048 --moe-layer-freq ([0]*3+[1]*58) "
    "--kv-channels 128 --seq-length 4096 --max-position-embeddings 163840 --position-embedding-type rope "
    "--vocab-size 129280 --mtp-num-layers 1"
)
QWEN = (
    "--num-layers 48 --hidden-size 2048 --num-attention-heads 32 --kv-channels 128 --group-query-attention "
    "--num-query-groups 4 --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 --swiglu "
    "--disable-bias-linear --untie-embeddings-and-output-weights --seq-length 4096 --vocab-size 151936 "
    "--max-position-embeddings 40960 --use-rotary-position-embeddings"
)
LLAMA = (
    "--num-layers 40 --hidden-size 5120 --num-attention-heads 40 --ffn-hidden-size 13824 --swiglu "
    "--disable-bias-linear --untie-embeddings-and-output-weights --seq-length 4096 --max-position-embeddings 4096 "
    "--vocab-size 32000 --position-embedding-type rope"
)


@pytest.mark.parametrize(
    ("shape", "total", "active"),
    [(MIXTRAL, 46.7, 12.9), (DEEPSEEK, 671.0, 37.5), (QWEN, 30.5, 3.35), (LLAMA, 13.0, 13.0)],
    ids=["mixtral-8x7b", "deepseek-v3", "qwen3-30b-a3b", "llama2-13b"],
)
def test_published_parameter_counts(shape: str, total: float, active: float) -> None:
    model = read(shape=shape).model
    moe = model.moe or Moe(num_experts=0, top_k=0, ffn_hidden=0)
    assert _params(model, moe.num_experts) == pytest.approx(total, rel=0.005)
    assert _params(model, moe.top_k) == pytest.approx(active, rel=0.01)


# ---------------------------------------------------------------------------------------- training


@pytest.mark.parametrize(
    ("extra", "precision", "grad"),
    [
        ("", "fp32", 4),
        ("--bf16", "bf16", 4),
        ("--bf16 --grad-reduce-in-bf16", "bf16", 2),
        ("--bf16 --accumulate-allreduce-grads-in-fp32", "bf16", 4),
        ("--fp16", "fp16", 2),
        ("--fp16 --accumulate-allreduce-grads-in-fp32", "fp16", 4),
        ("--bf16 --use-precision-aware-optimizer --main-grads-dtype bf16", "bf16", 2),
    ],
)
def test_precision_and_gradients(extra: str, precision: str, grad: float) -> None:
    training = read(extra).training
    assert (training.precision, training.grad_bytes) == (precision, grad)


def test_optimizer_states() -> None:
    aware = read("--use-precision-aware-optimizer --exp-avg-dtype fp8 --exp-avg-sq-dtype bf16 --main-params-dtype fp16")
    states = aware.training
    assert (states.main_params_bytes, states.exp_avg_bytes, states.exp_avg_sq_bytes) == (2, 1, 2)
    assert read("--bf16 --exp-avg-dtype fp8").training.exp_avg_bytes == 4
    assert read("--optimizer-cpu-offload").training.optimizer_offload_fraction == 1
    assert read("--optimizer-cpu-offload --optimizer-offload-fraction 0.5").training.optimizer_offload_fraction == 0.5


def test_fp8() -> None:
    assert read("--bf16 --fp8-recipe mxfp8").training.fp8_recipe is None
    assert read("--bf16 --fp8-format hybrid").training.fp8_recipe == "delayed"
    assert read("--bf16 --fp8-format e4m3 --fp8-recipe blockwise").training.fp8_recipe == "blockwise"
    assert read("--bf16 --fp8-hybrid").training.fp8_recipe == "delayed"


def test_global_batch_size() -> None:
    assert read("--micro-batch-size 2 --global-batch-size 64").training.global_batch_size == 64
    today = read("--micro-batch-size 2 --tensor-model-parallel-size 2", allocation=Allocation(world_size=16))
    assert today.training.global_batch_size == 16
    assert "data-parallel size 8" in today.origin["training.global_batch_size"]
    assert any("--global-batch-size is absent" in note for note in today.notes)
    assert read("--micro-batch-size 2").training.global_batch_size == 0
    told = read("--global-batch-size 64", global_batch_size=128)
    assert told.training.global_batch_size == 128
    assert {word.owner for word in told.argv if word.text in ("--global-batch-size", "64")} == {"plan"}
    assert read("--step-batch-size-schedule 0:64,1000000:256").training.global_batch_size == 256


# ----------------------------------------------------------------------------- present configuration


def test_degrees() -> None:
    present = read(
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --expert-model-parallel-size 4"
    ).present
    assert (present.tp, present.pp, present.ep, present.etp, present.cp) == (2, 4, 4, None, 1)
    assert not read("--sequence-parallel").present.sequence_parallel
    assert read("--sequence-parallel --tensor-model-parallel-size 2").present.sequence_parallel
    with pytest.raises(InputError, match="is 0"):
        read("--tensor-model-parallel-size 0")


@pytest.mark.parametrize(
    ("extra", "vpp"),
    [
        ("--num-layers-per-virtual-pipeline-stage 1", 4),
        ("--num-virtual-stages-per-pipeline-rank 2", 2),
        ("--pipeline-model-parallel-layout Et*2|(tt|)*2tt|L", 2),
        ("--pipeline-model-parallel-layout Et*4|t*4L", 1),
        ("", 1),
    ],
)
def test_virtual_stages(extra: str, vpp: int) -> None:
    layout_stages = read(f"--pipeline-model-parallel-size 2 {extra}").present.vpp
    assert layout_stages == vpp


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ("", ("none", (), None, 0)),
        ("--recompute-activations", ("selective", ("core_attn",), None, 0)),
        ("--recompute-activations --recompute-granularity full", ("selective", ("core_attn",), None, 0)),
        (
            "--recompute-granularity selective --recompute-modules moe_act mlp",
            ("selective", ("moe_act", "mlp"), None, 0),
        ),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 3", ("full", (), "block", 3)),
        ("--checkpoint-activations", ("full", (), "uniform", 1)),
        ("--activations-checkpoint-method block --activations-checkpoint-num-layers 2", ("full", (), "block", 2)),
        ("--moe-layer-recompute", ("selective", ("core_attn", "moe"), None, 0)),
        ("--recompute-num-layers 3", ("none", (), None, 0)),
    ],
)
def test_recompute(extra: str, expected: tuple[object, ...]) -> None:
    found = read(extra).present.recompute
    assert (found.granularity, found.modules, found.method, found.num_layers) == expected


# ---------------------------------------------------------------------------------------- refusals


def test_missing_shape_names_all_of_it() -> None:
    with pytest.raises(InputError, match=r"t\.sh:99: .*--num-layers, --hidden-size, --num-att.*, --seq-length"):
        read(shape="--bf16")
    with pytest.raises(InputError, match="checkpoint"):
        read(shape="--use-checkpoint-args --load /ckpt")


@pytest.mark.parametrize(
    "extra",
    [
        "--enable-hetero",
        "--hetero-process-meshes 2 1 1 4 1",
        "--yaml-cfg a.yaml",
        "--hybrid-layer-pattern M*M-",
        "--encoder-num-layers 4",
        "--heterogeneous-layers-config-path x.json",
        "--retro-add-retriever",
        "--num-experts 4 8",
        "--fp8-format hybrid --fp8-recipe custom",
    ],
)
def test_what_cannot_be_planned_is_refused(extra: str) -> None:
    with pytest.raises(Unsupported):
        read(extra)


@pytest.mark.parametrize(
    "entry", ["pretrain_bert.py", "/x/pretrain_t5.py", "pretrain_mamba.py", "multimodal/pretrain_vlm.py"]
)
def test_other_kinds_of_model_are_refused(entry: str) -> None:
    with pytest.raises(Unsupported, match="decoder-only"):
        read(entry=entry)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("--num-layers ?", r"t\.sh:12: the value of --num-layers is not known .*\$\(pick\)"),
        ("--tensor-model-parallel-size=<TP>", "'<TP>' is not a whole number"),
        ("--hidden-size", "--hidden-size has no value"),
        ("--recompute-granularity half", "is not one of full, selective"),
        ("--bf16 --fp16", "exclude"),
        ("--multi-latent-attention --group-query-attention", "exclude"),
        ("--num-attention-heads 7", "not a multiple"),
        ("--bf16 ?", "may be a flag"),
        ("--num-layers 0", "is not a size"),
    ],
)
def test_refusals_name_flag_and_line(extra: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(extra)


def test_programs_that_do_not_train_are_refused() -> None:
    with pytest.raises(Unsupported, match="does not train"):
        read(entry="tools/run_text_generation_server.py")


def test_unknown_values_of_other_flags_are_kept() -> None:
    got = read("--save ? --lr 1e-4")
    save = got.argv[11]
    assert (save.text, save.source, save.owner) == (None, '"$(pick)"', "user")


def test_forks_and_old_names() -> None:
    old = read("--batch-size 4 --model-parallel-size 2")
    assert (old.present.micro_batch_size, old.present.tp) == (4, 2)
    assert sum("Megatron today refuses" in note for note in old.notes) == 2
    megablocks = read("--moe-num-experts=64 --moe-top-k=1 --moe-capacity-factor=1.5").model.moe
    assert megablocks is not None
    assert (megablocks.num_experts, megablocks.top_k, megablocks.capacity_factor) == (64, 1, 1.5)
    deepspeed = read("--num-key-value-heads 4 --num-experts 16 --topk 2 --moe-expert-parallel-size 8")
    assert (deepspeed.model.num_kv_heads, deepspeed.present.ep) == (4, 8)
    mindspeed = read("--num-experts 16 --moe-intermediate-size 512 --n-shared-experts 2").model.moe
    assert mindspeed is not None
    assert mindspeed.shared_ffn_hidden == 1024
    assert any("meant?" in note for note in read("--tensor-model-paralel-size 4").notes)


# ------------------------------------------------------------------------------------------- forks


def test_deepspeed_defaults() -> None:
    got = read("--num-experts 64 --moe-expert-parallel-size 8 --create-moe-param-group --zero-stage 1")
    moe = got.model.moe
    assert moe is not None
    assert (moe.top_k, moe.capacity_factor, moe.pattern) == (1, 1.0, (False, True) * 4)
    assert got.training.distributed_optimizer and got.present.ep == 8
    assert any("Megatron-DeepSpeed" in note for note in got.notes)
    every = read(
        "--num-experts 64 --expert-interval 1 --topk 2 --disable-moe-token-dropping --mlp-type standard"
    ).model.moe
    assert every is not None and every.pattern == (True,) * 8
    assert (every.top_k, every.capacity_factor) == (2, None)
    assert read("--num-experts 1 --deepspeed").model.moe is None
    with pytest.raises(Unsupported, match="--mlp-type"):
        read("--num-experts 4 --mlp-type residual")


def test_megablocks_defaults() -> None:
    moe = read("--moe-num-experts=64 --moe-loss-weight=0.1").model.moe
    assert moe is not None and (moe.num_experts, moe.top_k, moe.capacity_factor) == (64, 1, None)
    assert moe.pattern == (True,) * 8
    factor = read("--moe-num-experts=64 --moe-top-k=2 --moe-capacity-factor=0").model.moe
    assert factor is not None and (factor.top_k, factor.capacity_factor) == (2, None)


@pytest.mark.parametrize(
    ("extra", "field", "value"),
    [
        ("--num_attention_heads_kv 4", "num_kv_heads", 4),
        ("--n-head-kv 2", "num_kv_heads", 2),
        ("--attention-head-type multiquery", "num_kv_heads", 1),
        ("--glu_activation swiglu", "gated", True),
        ("--use_rms_norm", "layernorm_bias", False),
        ("--no_tie_embed_logits", "tied_embeddings", False),
        ("--sliding-window 512", "attention_window", 512),
        ("--swiglu --multiple-of 256", "ffn_hidden", 2816),
        ("--swiglu --multiple-of 256 --hidden-dim-multiplier 1.3", "ffn_hidden", 3584),
    ],
)
def test_names_of_forks_change_the_shape(extra: str, field: str, value: object) -> None:
    assert getattr(read(extra).model, field) == value


def test_negative_frequency_is_every_layer() -> None:
    moe = read("--num-experts 4 --moe-layer-freq -1").model.moe
    assert moe is not None and moe.pattern == (True,) * 8


@pytest.mark.parametrize(
    "extra",
    [
        "--lora-r 16",
        "--cla-share-factor 2",
        "--enable-dsa-indexer",
        "--stage dpo",
        "--use_moba_attn",
        "--block-lm",
        "--freeze-LM",
    ],
)
def test_what_forks_add_is_refused_where_it_changes_the_model(extra: str) -> None:
    with pytest.raises(Unsupported, match=r"t\.sh"):
        read(extra)


@pytest.mark.parametrize(
    "entry",
    [
        "tasks/main.py", "tools/hf2mcore_qwen.py", "pretrain_qwen2_5_vl.py", "train_qwen3vl.py", "evaluation.py",
        "examples.inference.gpt.gpt_dynamic_inference", "convert.py", "pretrain_llava.py", "merge_mp_convert.py",
    ],
)  # fmt: skip
def test_other_programs(entry: str) -> None:
    with pytest.raises(Unsupported):
        read(entry=entry)
