"""Arguments of a run: defaults, and one-line errors with the value, the rule and the remedy."""

import dataclasses

import pytest

from commons.datasets.random.distribution import LengthDistribution
from commons.datasets.sequences.event_columns import EventColumns
from commons.distributed.options import ShufflerOptions
from commons.trainer import DatasetArgs, TrainerArgs
from commons.trainer.config.args import OptimizationArgs


def test_defaults():
    args = TrainerArgs(train_batch_size=16, eval_batch_size=8)
    expected = {
        **{"eval_interval": 100, "log_interval": 100, "max_train_iters": None, "max_eval_iters": None, "seed": 1234},
        **{"profile": False, "profile_step_start": 100, "profile_step_end": 200, "pipeline_type": "native"},
        **{"ckpt_save_interval": -1, "ckpt_save_dir": "./checkpoints", "ckpt_load_dir": ""},
        **{"enable_balanced_shuffler": False, "shuffle_eval": False, "shuffler": ShufflerOptions()},
        **{"single_rank_load": False, "balance_batch": False, "balance_sampler": False, "shuffle_window": 1},
        **{"budget_per_rank": None, "schedule_in": "steps", "balancing": "none", "balances_at_loading": False},
    }
    assert {name: getattr(args, name) for name in expected} == expected
    assert vars(DatasetArgs("random", 20)) == {
        **{"dataset_name": "random", "max_history_seqlen": 20, "dataset_path": None, "max_num_candidates": 0},
        **{"shuffle": False, "drop_last": False, "num_workers": 0, "num_tasks": 1, "num_batches": 100},
        **{"length_distribution": LengthDistribution(), "columns": EventColumns()},
    }


SHUFFLER, SAMPLER, RANK_0 = {"enable_balanced_shuffler": True}, {"balance_sampler": True}, {"single_rank_load": True}
WINDOW, BUDGET = {"shuffle_window": 2}, {"budget_per_rank": 8.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_batch_size": 0}, "train_batch_size is 0; it must be an integer of at least 1: correct it"),
        ({"eval_interval": True}, "eval_interval is True"),
        ({"profile_step_start": 5, "profile_step_end": 5}, "profile_step_end is 5, profile_step_start is 5"),
        ({"pipeline_type": "nativ"}, "pipeline_type is 'nativ'; registered are .*'native'"),
        ({"shuffle_eval": True}, "shuffle_eval is True and enable_balanced_shuffler is False"),
        ({"balance_batch": True}, "balance_batch is True and single_rank_load .* or enable_balanced_shuffler instead"),
        (
            RANK_0 | {"balance_batch": True, "shuffler": ShufflerOptions(max_tokens_per_rank=9)},
            "balance_batch is True and shuffler.max_tokens_per_rank is 9; .* leave the cap out, or set",
        ),
        (SHUFFLER | RANK_0 | {"balance_batch": True}, "balance_batch and enable_balanced_shuffler are both .* set one"),
        (WINDOW, "shuffle_window is 2 and balancing is off; .* or leave shuffle_window 1"),
        (SHUFFLER | SAMPLER, "balance_sampler and enable_balanced_shuffler are both True; .* set one of them"),
        (SAMPLER | RANK_0, "single_rank_load is True and balance_sampler is True; .* set balance_batch instead, or"),
        (
            SHUFFLER | RANK_0 | WINDOW,
            "single_rank_load is True and shuffle_window is 2; rank 0 distributes every batch separately",
        ),
        (BUDGET, "budget_per_rank is 8.0, balance_sampler is False and shuffle_window is 1; .* set"),
        (BUDGET | SAMPLER | WINDOW, "balance_sampler is True and shuffle_window is 2; .* leave shuffle_window 1"),
        (SAMPLER | {"budget_per_rank": 0.0}, "budget_per_rank is 0.0; it must be a positive"),
        (BUDGET | SAMPLER, "budget_per_rank is 8.0 and shuffler.equal_size is True; .* set shuffler.equal_size to"),
        (
            {"schedule_in": "rows", "eval_interval": 3},
            "eval_interval is 3, schedule_in is 'rows' and a step has 4 rows or more; it would be due after every step",
        ),
        ({"schedule_in": "rows", "ckpt_save_interval": 2}, "ckpt_save_interval is 2, schedule_in is 'rows'"),
        (
            {"schedule_in": "rows", "eval_interval": 16, "global_batch_size": 32},
            "eval_interval is 16, schedule_in is 'rows' and a step has 32 rows or more",
        ),
        (
            SAMPLER | {"shuffler": ShufflerOptions(mode="off", calibration="gpu.toml")},
            "shuffler.mode is 'off' and shuffler.calibration is 'gpu.toml'; .* balanced by operations: leave out one",
        ),
        (
            RANK_0 | {"balance_batch": True, "shuffler": ShufflerOptions(mode="off", calibration="gpu.toml")},
            "shuffler.mode is 'off' and shuffler.calibration is 'gpu.toml'; .* balanced by operations: leave out one",
        ),
        (
            SAMPLER | {"shuffler": ShufflerOptions(equal_size=False)},
            "balance_sampler is True, budget_per_rank is None and shuffler.equal_size is False; .* set budget_per_rank",
        ),
        (
            SAMPLER | {"shuffler": ShufflerOptions(speeds="measured")},
            "balance_sampler is True and shuffler.speeds is 'measured'; .* set enable_balanced_shuffler instead",
        ),
        (
            RANK_0 | {"balance_batch": True, "shuffler": ShufflerOptions(speeds="measured")},
            "balance_batch is True and shuffler.speeds is 'measured'; .* set enable_balanced_shuffler instead",
        ),
        ({"ckpt_save_interval": 0}, "ckpt_save_interval is 0; it must be an integer of at least 1"),
        ({"ckpt_save_interval": 3, "optimization": OptimizationArgs(accumulation_steps=2)}, "give a multiple"),
        ({"ckpt_save_dir": ""}, "ckpt_save_dir is empty; it is a folder"),
        ({"run_dir": ""}, "run_dir is empty; it is the folder of the run"),
        ({"optimization": {"max_grad_norm": 0.0}}, "finite number: correct it, or leave it out"),
        ({"optimization": {"min_lr_ratio": 1.5}}, "min_lr_ratio is 1.5"),
        ({"optimization": {"min_lr_ratio": True}}, "min_lr_ratio is True"),
        (
            {"optimization": {"lr_schedule": "linear"}},
            "lr_schedule is 'linear'; it must be one of 'constant', 'cosine'",
        ),
        ({"schedule_in": "row"}, "schedule_in is 'row'; it must be one of 'steps', 'rows': write 'rows'"),
        ({"dataset_name": ""}, "dataset_name is empty"),
        ({"num_tasks": 0}, "num_tasks is 0"),
        (
            {"dataset_name": "ml-1m", "length_distribution": LengthDistribution("zipf", alpha=1.2)},
            "length_distribution is set and dataset_name is 'ml-1m'; .* or choose 'random' or 'sid-random'",
        ),
        ({"peak_tflops": 0.0}, "peak_tflops is 0.0; it is the positive rate"),
        (
            {"peak_tflops": 989e12},
            "peak_tflops is 989000000000000.0; it is the positive rate of a data sheet, at most 1e9",
        ),
        ({"peak_tflops": True}, "peak_tflops is True; it is the positive rate"),
        (
            {"sinks": ("graphite",)},
            "a name in sinks is 'graphite'; it must be one of 'tensorboard', 'wandb', 'mlflow', 'opentelemetry'",
        ),
        ({"device": "gpu"}, "device is 'gpu'; it must be one of 'auto', 'cpu', 'cuda'"),
        ({"overwrite": True, "ckpt_load_dir": "x"}, "overwrite is True and ckpt_load_dir is 'x'; .*: give one of the"),
    ],
)
def test_a_wrong_argument(changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        if isinstance(optimization := changes.get("optimization"), dict):
            changes = {"optimization": OptimizationArgs(**optimization)}
        if changes.keys() & DatasetArgs.__dataclass_fields__.keys():
            DatasetArgs(**({"dataset_name": "random", "max_history_seqlen": 4} | changes))
        else:
            TrainerArgs(**({"train_batch_size": 4, "eval_batch_size": 4} | changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["shuffler", "optimization", "sink_options"])
@pytest.mark.parametrize("value", [None, {}, TrainerArgs])
def test_settings_of_settings_are_of_their_class(name, value):
    with pytest.raises(TypeError, match=f"^{name} is .*; it must be an? .*(Options|Args): make one, or leave it out$"):
        TrainerArgs(4, 4, **{name: value})


def test_limits_are_allowed_and_rules_hold_only_where_they_matter():
    rows, off = {"schedule_in": "rows"}, {"shuffler": ShufflerOptions(mode="off")}
    for changes in (
        rows | {"eval_interval": 4},  # as many as a step of one rank has
        rows | {"ckpt_save_interval": 101, "optimization": OptimizationArgs(accumulation_steps=2)},
        {"optimization": OptimizationArgs(min_lr_ratio=1.0)},
        {"profile_step_start": 5, "profile_step_end": 6},
        off | SAMPLER,
        SAMPLER | {"shuffler": ShufflerOptions(calibration="gpu.toml")},
        {"shuffler": ShufflerOptions(mode="off", calibration="gpu.toml")},
        SAMPLER | WINDOW,
    ):
        args = TrainerArgs(**({"train_batch_size": 4, "eval_batch_size": 4} | changes))
        assert {name: getattr(args, name) for name in changes} == changes
    assert [TrainerArgs(4, 4, **SHUFFLER, shuffle_window=window).balancing for window in (1, 2)] == [
        "batches",
        "windows",
    ]


def test_a_loader_gets_the_options_of_its_kind_of_data():
    lengths, columns = LengthDistribution("zipf", alpha=1.2), EventColumns(item="movie")
    drawn = DatasetArgs("random", 4, num_batches=3, length_distribution=lengths).loader_options()
    assert (drawn["num_batches"], drawn["length_distribution"]) == (3, lengths) and "columns" not in drawn
    read = DatasetArgs("parquet", 4, columns=columns).loader_options()
    assert read["columns"] == columns and "num_batches" not in read


def test_a_global_batch_replaces_the_batch_of_a_rank():
    args = TrainerArgs(512, 4, global_batch_size=8, schedule_in="rows", eval_interval=64)
    assert args.eval_interval == 64


def test_a_step_with_a_budget_may_have_few_rows():
    """Fewer than train_batch_size, which is then the most that a rank gets: 32 rows are four steps or so."""
    options = {"schedule_in": "rows", "shuffler": ShufflerOptions(equal_size=False), **SAMPLER, **BUDGET}
    assert TrainerArgs(128, 4, eval_interval=32, ckpt_save_interval=32, **options).balancing == "budget"


@dataclasses.dataclass
class _WithOwnField(TrainerArgs):
    is_mine: bool = dataclasses.field(init=False)

    def __post_init__(self):
        super().__post_init__()
        self.is_mine = True


def test_a_subclass_may_set_a_field_after_the_checks():
    assert _WithOwnField(4, 4).is_mine
