"""Training configs for the command line, as a file and as flags of `hstu.train`."""

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

TINY = [
    *("--trainer.train-batch-size", "6", "--trainer.eval-batch-size", "4", "--trainer.device", "cpu"),
    *("--trainer.log-interval", "2", "--trainer.eval-interval", "4", "--trainer.max-eval-iters", "2"),
    *("--dataset.dataset-name", "random", "--dataset.num-batches", "6", "--dataset.max-history-seqlen", "20"),
    *("--dataset.max-num-candidates", "3", "--model.hidden-size", "16", "--model.num-layers", "1"),
    *("--model.num-attention-heads", "2", "--model.kv-channels", "8", "--model.prediction-head-arch", "8", "1"),
]
