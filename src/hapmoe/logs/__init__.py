"""Measurements that exist already: Megatron's logs, nccl-tests' output, counts of tokens per expert."""
