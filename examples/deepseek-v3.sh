#!/bin/bash
#SBATCH --job-name=deepseek-v3
#SBATCH --nodes=32
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
# DeepSeek-V3: 61 layers (3 dense first), 256 experts top-8 with one shared, MLA, one MTP layer.
# Sizes can be overridden from outside:  PP=8 EP=32 sbatch deepseek-v3.sh

export CUDA_DEVICE_MAX_CONNECTIONS=1
export NCCL_NVLS_ENABLE=0
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True

: "${MEGATRON_PATH:=/opt/Megatron-LM}"
: "${RUN_DIR:=runs/deepseek-v3}"
: "${NNODES:=${SLURM_NNODES:-32}}"
: "${GPUS_PER_NODE:=8}"

TP=${TP:-1}
PP=${PP:-16}
EP=${EP:-16}
MBS=${MBS:-1}
GBS=${GBS:-8192}
SEQ_LEN=${SEQ_LEN:-4096}

NUM_LAYERS=61
DENSE_LAYERS=3
MOE_LAYERS=$((NUM_LAYERS - DENSE_LAYERS))
MOE_LAYER_FREQ="([0]*${DENSE_LAYERS}+[1]*${MOE_LAYERS})"
EXPERT_FFN=2048
SHARED_EXPERTS=1

# Embedding and three dense layers open the pipeline, the MTP layer and the loss close it.
if [ "$PP" -eq 16 ]; then
    LAYOUT="Et*4|t*4|t*4|t*4|t*4|t*4|t*4|t*4|t*4|t*4|t*4|t*4|t*4|t*4|t*4|tmL"
    PIPELINE_ARGS="--pipeline-model-parallel-layout $LAYOUT"
else
    PIPELINE_ARGS="--decoder-last-pipeline-num-layers ${LAST_STAGE_LAYERS:-5}"
fi

MODEL_ARGS="
    --num-layers $NUM_LAYERS
    --hidden-size 7168
    --ffn-hidden-size 18432
    --num-attention-heads 128
    --kv-channels 128
    --seq-length $SEQ_LEN
    --max-position-embeddings 163840
    --position-embedding-type rope
    --rotary-base 10000
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --qk-layernorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --init-method-std 0.006
    --make-vocab-size-divisible-by 1280
"

MLA_ARGS="
    --multi-latent-attention
    --q-lora-rank 1536
    --kv-lora-rank 512
    --qk-head-dim 128
    --qk-pos-emb-head-dim 64
    --v-head-dim 128
    --rotary-scaling-factor 40
    --mscale 1.0
    --mscale-all-dim 1.0
    --no-rope-fusion
"

MOE_ARGS="
    --num-experts 256
    --moe-layer-freq $MOE_LAYER_FREQ
    --moe-ffn-hidden-size $EXPERT_FFN
    --moe-shared-expert-intermediate-size $((SHARED_EXPERTS * EXPERT_FFN))
    --moe-router-topk 8
    --moe-router-num-groups 8
    --moe-router-group-topk 4
    --moe-router-score-function sigmoid
    --moe-router-pre-softmax
    --moe-router-topk-scaling-factor 2.5
    --moe-router-enable-expert-bias
    --moe-router-bias-update-rate 1e-3
    --moe-router-load-balancing-type seq_aux_loss
    --moe-aux-loss-coeff 1e-4
    --moe-router-dtype fp32
    --moe-token-dispatcher-type alltoall
    --moe-grouped-gemm
    --moe-permute-fusion
"

MTP_ARGS="--mtp-num-layers 1 --mtp-loss-scaling-factor 0.1"

TRAIN_ARGS="
    --micro-batch-size $MBS
    --global-batch-size $GBS
    --train-samples ${TRAIN_SAMPLES:-585937500}
    --lr-decay-samples 584765624
    --lr-warmup-samples 1536000
    --lr 3.9e-6
    --min-lr 3.9e-7
    --lr-decay-style cosine
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --clip-grad 1.0
    --bf16
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
    --recompute-granularity selective
    --recompute-modules mla_up_proj moe_act layernorm
"

DATA_ARGS="
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model ${TOKENIZER:-deepseek-ai/DeepSeek-V3}
    --vocab-size 129280
    --data-path ${DATA_PATH:-/data/corpus_text_document}
    --split 99,1,0
    --num-workers 6
    --no-create-attention-mask-in-dataloader
"

CKPT_ARGS="
    --save $RUN_DIR/checkpoints
    --load $RUN_DIR/checkpoints
    --save-interval 500
    --ckpt-format torch_dist
    --dist-ckpt-optim-fully-reshardable
    --async-save
"

LOG_ARGS="
    --log-interval 1
    --log-throughput
    --eval-iters 32
    --eval-interval 200
    --tensorboard-dir $RUN_DIR/tensorboard
"

PARALLEL_ARGS="
    --tensor-model-parallel-size $TP
    --pipeline-model-parallel-size $PP
    --expert-model-parallel-size $EP
    --expert-tensor-parallel-size 1
"
if [ "$TP" -gt 1 ]; then
    PARALLEL_ARGS="$PARALLEL_ARGS --sequence-parallel"
fi

LAUNCH="torchrun --nnodes $NNODES --nproc-per-node $GPUS_PER_NODE
    --node-rank ${SLURM_NODEID:-0}
    --master-addr ${MASTER_ADDR:-localhost}
    --master-port ${MASTER_PORT:-29500}"

$LAUNCH $MEGATRON_PATH/pretrain_gpt.py \
    $MODEL_ARGS $MLA_ARGS $MOE_ARGS $MTP_ARGS $TRAIN_ARGS $DATA_ARGS \
    $CKPT_ARGS $LOG_ARGS $PARALLEL_ARGS $PIPELINE_ARGS "$@"
