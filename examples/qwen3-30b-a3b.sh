#!/usr/bin/env bash
# Qwen3-30B-A3B continued pre-training on two nodes.
#
#   usage: qwen3-30b-a3b.sh NODE_RANK MASTER_ADDR [extra Megatron arguments...]

set -euo pipefail

NODE_RANK=${1:-0}
MASTER_ADDR=${2:-127.0.0.1}
shift $(( $# > 2 ? 2 : $# ))

export CUDA_DEVICE_MAX_CONNECTIONS=1
export TORCH_NCCL_AVOID_RECORD_STREAMS=1

readonly HERE=${MEGATRON_PATH:-/opt/Megatron-LM}
readonly GPUS=8 NODES=2

function model_args() {
    echo --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144
    echo --num-attention-heads 32 --kv-channels 128
    echo --group-query-attention --num-query-groups 4
    echo --qk-layernorm --swiglu --normalization RMSNorm --norm-epsilon 1e-6
    echo --disable-bias-linear --untie-embeddings-and-output-weights
    echo --position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0
    echo --attention-dropout 0.0 --hidden-dropout 0.0
}

declare -A moe=(
    [num-experts]=128
    [moe-router-topk]=8
    [moe-ffn-hidden-size]=768
    [moe-aux-loss-coeff]=1e-3
    [moe-router-load-balancing-type]=aux_loss
    [moe-token-dispatcher-type]=alltoall
    [moe-router-dtype]=fp32
)
moe_args=()
for key in num-experts moe-router-topk moe-ffn-hidden-size moe-aux-loss-coeff \
           moe-router-load-balancing-type moe-token-dispatcher-type moe-router-dtype; do
    moe_args+=("--$key" "${moe[$key]}")
done
moe_args+=(--moe-grouped-gemm --moe-permute-fusion)

case "${SCHEDULE:-short}" in
    short) seq=4096;  batch=256 ;;
    long)  seq=32768; batch=64 ;;
    *)     echo "unknown SCHEDULE" >&2; exit 1 ;;
esac

train_args=(
    --seq-length "$seq" --max-position-embeddings 40960
    --micro-batch-size 1 --global-batch-size "$batch"
    --train-iters 20000 --lr 1e-5 --min-lr 1e-6 --lr-decay-style cosine --lr-warmup-fraction 0.01
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0
    --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --recompute-activations
)
parallel_args=(
    --tensor-model-parallel-size 2 --sequence-parallel
    --pipeline-model-parallel-size 1
    --context-parallel-size $(( seq > 8192 ? 2 : 1 ))
    --expert-model-parallel-size 8 --expert-tensor-parallel-size 1
)
data_args=(
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "${TOKENIZER:-Qwen/Qwen3-30B-A3B}"
    --vocab-size 151936 --make-vocab-size-divisible-by 128
    --data-path 0.7 "${DATA:-/data}/web_text_document" 0.3 "${DATA:-/data}/code_text_document"
    --split 990,10,0 --num-workers 8
)
save_args=(
    --save "${OUT:-/ckpt/qwen3-30b-a3b}" --load "${OUT:-/ckpt/qwen3-30b-a3b}"
    --save-interval 500 --ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable
    --log-interval 1 --eval-interval 500 --eval-iters 10
    --tensorboard-dir "${OUT:-/ckpt/qwen3-30b-a3b}/tb-$(date +%Y%m%d-%H%M)"
)

exec python -m torch.distributed.run \
    --nnodes=$NODES --nproc-per-node=$GPUS --node-rank="$NODE_RANK" \
    --master-addr="$MASTER_ADDR" --master-port=29500 \
    "$HERE/pretrain_gpt.py" \
    $(model_args) "${moe_args[@]}" "${train_args[@]}" "${parallel_args[@]}" \
    "${data_args[@]}" "${save_args[@]}" "$@"
