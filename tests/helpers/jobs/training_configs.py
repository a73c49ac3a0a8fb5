"""Training configs for the command line."""

from __future__ import annotations

CONFIG = """
[trainer]
train_batch_size = 8
eval_batch_size = 4
max_train_iters = 2
[dataset]
dataset_name = "random"
max_history_seqlen = 64
max_num_candidates = {candidates}
num_batches = 5
[model]
hidden_size = 32
num_layers = 1
num_attention_heads = 2
kv_channels = 16
"""
