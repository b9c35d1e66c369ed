#!/bin/bash
# Llama 3.1 405B, dense: shape of the published config.json, batch of 16M tokens (arXiv:2407.21783, Table 4).
export CUDA_DEVICE_MAX_CONNECTIONS=1

torchrun --nnodes ${NNODES:-2048} --nproc-per-node 8 --node-rank ${NODE_RANK:-0} \
    --master-addr ${MASTER_ADDR:-localhost} --master-port 6000 pretrain_gpt.py \
    --num-layers 126 \
    --hidden-size 16384 \
    --ffn-hidden-size 53248 \
    --num-attention-heads 128 \
    --group-query-attention \
    --num-query-groups 8 \
    --seq-length 8192 \
    --max-position-embeddings 131072 \
    --position-embedding-type rope \
    --normalization RMSNorm \
    --swiglu \
    --disable-bias-linear \
    --untie-embeddings-and-output-weights \
    --vocab-size 128256 \
    --tokenizer-type NullTokenizer \
    --mock-data \
    --tensor-model-parallel-size 8 \
    --pipeline-model-parallel-size 16 \
    --sequence-parallel \
    --micro-batch-size 1 \
    --global-batch-size 2048 \
    --lr 8.0e-5 \
    --train-iters 100000 \
    --use-distributed-optimizer \
    --overlap-grad-reduce \
    --overlap-param-gather \
    --bf16
