#!/bin/bash
# Mixtral 8x7B from scratch with Megatron-LM, 32 GPUs by default.
#
#   NNODES=4 NODE_RANK=$SLURM_NODEID MASTER_ADDR=node0 DATA_PATH=/data/corpus_text_document ./mixtral-8x7b.sh

set -e
export CUDA_DEVICE_MAX_CONNECTIONS=1

GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NNODES=${NNODES:-4}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-6000}

MEGATRON_PATH=${MEGATRON_PATH:-.}
CHECKPOINT_PATH=${CHECKPOINT_PATH:-checkpoints/mixtral-8x7b}
TOKENIZER_MODEL=${TOKENIZER_MODEL:-tokenizer.model}
DATA_PATH=${DATA_PATH:-data/corpus_text_document}

DISTRIBUTED_ARGS=(
    --nproc_per_node "$GPUS_PER_NODE"
    --nnodes "$NNODES"
    --node_rank "$NODE_RANK"
    --master_addr "$MASTER_ADDR"
    --master_port "$MASTER_PORT"
)

MODEL_ARGS=(
    --seq-length 4096
    --max-position-embeddings 32768
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --position-embedding-type rope
    --rotary-base 1000000
    --no-position-embedding
    --disable-bias-linear
    --swiglu
    --normalization RMSNorm
    --untie-embeddings-and-output-weights
    --init-method-std 0.01
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --attention-backend flash
)

MOE_ARGS=(
    --num-experts 8
    --moe-router-topk 2
    --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 1e-2
    --moe-grouped-gemm
    --moe-permute-fusion
    --moe-token-dispatcher-type alltoall
)

DATA_ARGS=(
    --tokenizer-type Llama2Tokenizer
    --tokenizer-model "$TOKENIZER_MODEL"
    --vocab-size 32000
    --data-path "$DATA_PATH"
    --split 99990,8,2
)

TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 256
    --lr 1e-4
    --min-lr 1e-5
    --lr-decay-style cosine
    --lr-decay-iters 320000
    --lr-warmup-iters 500
    --train-iters 500000
    --weight-decay 0.1
    --clip-grad 1.0
    --bf16
)

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 4
    --expert-model-parallel-size 8
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
    --sequence-parallel
)

LOGGING_ARGS=(
    --log-interval 1
    --log-throughput
    --save-interval 10000
    --eval-interval 1000
    --eval-iters 10
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH"
    --ckpt-format torch_dist
    --dist-ckpt-optim-fully-reshardable
    --tensorboard-dir "$CHECKPOINT_PATH/tensorboard"
    --no-load-optim
    --no-load-rng
)

torchrun "${DISTRIBUTED_ARGS[@]}" "$MEGATRON_PATH/pretrain_gpt.py" \
    "${MODEL_ARGS[@]}" \
    "${MOE_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${MODEL_PARALLEL_ARGS[@]}" \
    "${LOGGING_ARGS[@]}"
