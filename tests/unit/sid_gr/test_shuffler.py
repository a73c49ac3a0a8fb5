"""What a row costs, counted over the operations of the decoder; and the configs that are refused."""

import contextlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from commons.datasets.sids.dataset import CANDIDATE, HISTORY, SIDDataset
from commons.datasets.sids.map import ITEMS_DIGEST, SIDMap
from commons.distributed.options import ShufflerOptions
from commons.perf_model.task_estimator import SelfAttentionTask
from commons.trainer import DatasetArgs, TrainerArgs
from commons.trainer.config.args import OptimizationArgs
from sid_gr import SIDGRBalancedBatchShuffler
from sid_gr.model.config import SIDGRConfig
from sid_gr.recipe import SIDGRRecipe
from sid_gr.train_config import ModelArgs, SIDArgs, TrainConfig
from tests.helpers.datasets.sid_users import Users
from tests.helpers.models.calibrations import write_calibration
from tests.helpers.models.sid_models import SIZES, make_batch


@given(
    seed=st.integers(0, 99),
    hidden=st.integers(1, 9),
    heads=st.integers(1, 3),
    head_dim=st.integers(1, 5),
    layers=st.integers(1, 3),
    ffn=st.none() | st.integers(1, 20),
)
def test_workloads_are_those_of_the_layers_and_of_the_head_of_each_code(seed, hidden, heads, head_dim, layers, ffn):
    batch = make_batch(seed, num_real=5)
    shuffler = SIDGRBalancedBatchShuffler(hidden, heads, head_dim, layers, ffn_hidden_size=ffn)
    task = SelfAttentionTask(hidden, heads, head_dim, layers, ffn_hidden_size=ffn)
    expected = []
    for row in range(batch.actual_batch_size):
        history, candidates = (int(batch.code_lengths(key)[row]) for key in (HISTORY, CANDIDATE))
        of_layers = task.get_workloads(1 + history + max(candidates - 1, 0))
        expected.append(of_layers + sum(2 * hidden * SIZES[code % 3] for code in range(candidates)))
    workloads = shuffler.get_workloads(batch)
    assert workloads.dtype == torch.int64 and workloads.shape == (batch.batch_size,)
    assert workloads[: batch.actual_batch_size].tolist() == expected
    model = ModelArgs(hidden, layers, heads, kv_channels=head_dim, ffn_hidden_size=ffn)
    sid = SIDArgs(codebook_sizes=SIZES)
    recipe = SIDGRRecipe(TrainConfig(TrainerArgs(6, 6), DatasetArgs("sid-random", 12), sid, model), torch.device("cpu"))
    assert recipe.flops(batch) == 3 * sum(expected)
    shuffler.close()


def test_with_a_calibration_a_row_costs_its_measured_time(tmp_path):
    """Measured for a feed-forward block of the default width, which the file states as a number."""
    batch, task = make_batch(0, num_real=5), SelfAttentionTask(8, 2, 4, 3, ffn_hidden_size=32)
    options = ShufflerOptions(calibration=write_calibration(tmp_path / "c.toml", task))
    with contextlib.closing(SIDGRBalancedBatchShuffler(8, 2, 4, 3, options=options)) as shuffler:
        found = shuffler.shuffle(batch, return_workloads=True)[1].double()
    ms = 0.25 + 0.5 * batch.sequence_lengths()[:5].double()  # as in the file: per row and per token
    torch.testing.assert_close(found / found.sum(), ms / ms.sum(), rtol=1e-6, atol=0)


def config(**changes) -> SIDGRConfig:
    sizes = {"codebook_sizes": (4, 4), "max_items": 5, "hidden_size": 8, "num_layers": 1, "num_attention_heads": 4}
    return SIDGRConfig(**sizes | changes)


def train_config(trainer=(), dataset_name="sid-random", **parts):
    return TrainConfig(TrainerArgs(4, 4, **dict(trainer)), DatasetArgs(dataset_name, 8), **parts)


def test_a_checkpoint_fits_with_another_dropout():
    def of_checkpoint(**changes):
        recipe = SIDGRRecipe(train_config(), torch.device("cpu"))
        recipe.model_config = config(**changes)
        return recipe.fingerprint()

    assert of_checkpoint(dropout=0.5, init_method_std=1.0) == of_checkpoint() != of_checkpoint(heads="shared")


def test_a_checkpoint_fits_only_with_its_map():
    """Maps of equal codebooks and equally many items, of which one is made again with another seed."""

    def of_checkpoint(seed):
        recipe = SIDGRRecipe(train_config({"seed": seed}), torch.device("cpu"))
        recipe.model_config = config()
        return recipe.fingerprint()

    assert of_checkpoint(1) == of_checkpoint(1)
    different = {name for name, value in of_checkpoint(1).items() if value != of_checkpoint(2)[name]}
    assert different == {"sid_map"}


@pytest.mark.parametrize(("stated", "different"), [({}, {"items"}), ({ITEMS_DIGEST: "films"}, set())])
def test_a_checkpoint_fits_only_with_the_items_that_its_map_had(stated, different):
    """A map of one's own does not state its items; a map that does is compared with the data already."""

    def of_checkpoint(items_digest):
        users = Users([[0, 1]])
        users.items_digest = lambda: items_digest
        sid_map = SIDMap(np.arange(2), np.array([[0, 1], [1, 0]]), (4, 4), stated)
        recipe = SIDGRRecipe(train_config(), torch.device("cpu"))
        dataset = SIDDataset(users, sid_map, batch_size=2, max_history_length=4)
        recipe.sid_map, recipe.single_loader = sid_map, DataLoader(dataset)
        return recipe.fingerprint()

    films, others = of_checkpoint("films"), of_checkpoint("" if stated else "books")
    assert {name for name, value in films.items() if value != others[name]} == different


CLIPPED = {"optimization": OptimizationArgs(max_grad_norm=1.0)}
HALVES = {"model": ModelArgs(tensor_model_parallel_size=2)}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: config(codebook_sizes=()), "codebook_sizes is empty"),
        (lambda: config(codebook_sizes=(4, 0)), "a size in codebook_sizes is 0"),
        (lambda: config(max_items=0), "max_items is 0"),
        (lambda: config(num_attention_heads=3), "hidden_size is 8, num_attention_heads is 3"),
        (lambda: config(kv_channels=0), "kv_channels is 0"),
        (lambda: config(heads="tied"), "heads is 'tied'"),
        (lambda: config(dropout=1.0), "dropout is 1.0"),
        (lambda: config(init_method_std=0.0), "init_method_std is 0.0"),
        (lambda: config(ffn_hidden_size=7, tensor_model_parallel_size=2), "ffn_hidden_size is 7"),
        (
            lambda: train_config(model=ModelArgs(tensor_model_parallel_size=3)),
            "num_attention_heads is 4, tensor_model_parallel_size is 3",
        ),
        (lambda: train_config({"top_k_for_generation": 5}), "has 'NDCG@10', generation ranks 5 items"),
        (lambda: train_config({"top_k_for_generation": 0}), "top_k_for_generation is 0"),
        (lambda: train_config(CLIPPED, **HALVES), "computes only the norm of its own part"),
        (lambda: train_config(shuffler_type="sidgr"), "shuffler_type is 'sidgr'; registered are"),
        (lambda: train_config(dataset_name="ml-1m"), "is 'ml-1m', .* no semantic IDs; .*write 'sid-ml-1m'"),
    ],
)
def test_settings_are_checked(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_derived_dimensions_and_defaults_of_generation():
    made = config(kv_channels=3, codebook_sizes=[4, 4, 4])
    assert (made.head_dim, made.ffn_width, made.max_sequence_length, made.num_hierarchies) == (3, 32, 15, 3)
    run = train_config(CLIPPED)
    assert run.trainer.top_k_for_generation == 10 and run.trainer.eval_metrics == ("HitRate@2", "NDCG@10")
    assert made.codebook_sizes == (4, 4, 4) and run.sid.codebook_sizes == (500,) * 4


def test_costs_of_a_decoder_that_ranks_share_cannot_be_measured(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        "[trainer]\ntrain_batch_size = 4\neval_batch_size = 4\n[dataset]\ndataset_name = 'sid-random'\n"
        "max_history_seqlen = 8\n[model]\ntensor_model_parallel_size = 2\n"
    )
    with pytest.raises(ValueError, match="tensor_model_parallel_size is 2; costs are measured in one process"):
        SIDGRRecipe.load(path, torch.device("cpu"))


def test_a_map_is_needed_for_real_items(tmp_path):
    assert SIDArgs(num_random_items=7, codebook_sizes=(2, 4)).load_map("sid-random", seed=1).num_items == 7
    with pytest.raises(ValueError, match="sid.map_path is not set; 'sid-ml-1m' needs the SIDs of its items"):
        SIDArgs().load_map("sid-ml-1m", seed=1)
    with pytest.raises(FileNotFoundError):
        SIDArgs(map_path=str(tmp_path / "sids.parquet")).load_map("sid-ml-1m", seed=1)
