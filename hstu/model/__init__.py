"""The HSTU model: tokens, attention over jagged rows, layers, ranking head.

The flow of a batch, and the file of each step:

    embeddings ─► tokens.py ─► attention_plan.py ─► layer.py (attention.py in each layer) ─► ranking.py ─► loss
"""

from hstu.model.attention import hstu_attention
from hstu.model.attention_plan import AttentionPlan, plan_attention
from hstu.model.config import HSTUConfig, RankingConfig
from hstu.model.layer import HSTUEncoder, HSTULayer
from hstu.model.ranking import HSTURankingModel, RankingOutput, RankingTower
from hstu.model.tokens import TokenSequence, interleave_tokens

__all__ = [
    "AttentionPlan",
    "HSTUConfig",
    "HSTUEncoder",
    "HSTULayer",
    "HSTURankingModel",
    "RankingConfig",
    "RankingOutput",
    "RankingTower",
    "TokenSequence",
    "hstu_attention",
    "interleave_tokens",
    "plan_attention",
]
