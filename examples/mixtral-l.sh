#!/bin/bash
# Mixtral-L: the larger of the two MoE models of arXiv:2609.39350.
# Synthetic data and the null tokenizer: it measures, it does not learn.

export CUDA_DEVICE_MAX_CONNECTIONS=1

NNODES=${NNODES:-4}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
MEGATRON_PATH=${MEGATRON_PATH:-.}

DISTRIBUTED_ARGS=(
    --nnodes "$NNODES"
    --nproc-per-node "$GPUS_PER_NODE"
    --node-rank "${NODE_RANK:-0}"
    --master-addr "${MASTER_ADDR:-localhost}"
    --master-port "${MASTER_PORT:-6000}"
)

MODEL_ARGS=(
    --num-layers 48
    --hidden-size 6144
    --ffn-hidden-size 16384
    --num-attention-heads 48
    --group-query-attention
    --num-query-groups 8
    --seq-length 4096
    --max-position-embeddings 4096
    --position-embedding-type rope
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --num-experts 8
    --moe-router-topk 2
    --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 1e-2
    --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall
)

TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 512
    --train-iters ${TRAIN_ITERS:-50}
    --lr 1e-4
    --lr-decay-style constant
    --clip-grad 1.0
    --bf16
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
    --tokenizer-type NullTokenizer
    --vocab-size 32000
    --mock-data
    --split 99,1,0
    --log-interval 1
    --log-throughput
    --eval-iters 0
)

PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 4
    --expert-model-parallel-size 8
)

torchrun "${DISTRIBUTED_ARGS[@]}" "$MEGATRON_PATH/pretrain_gpt.py" \
    "${MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${PARALLEL_ARGS[@]}"
