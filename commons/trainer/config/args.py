"""TrainerArgs and DatasetArgs: the settings of a training run, checked when they are made."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from commons.checks import require_at_least
from commons.datasets.random.distribution import RANDOM_DATASETS, LengthDistribution
from commons.datasets.sequences.event_columns import EventColumns
from commons.distributed.options import ShufflerOptions
from commons.trainer.config.sink_options import SinkName, SinkOptions

# What makes the ranks even: nothing; the shuffler, batch by batch or in windows; rank 0, which deals rows out by their
# work; or the sampler, in steps of as many rows or of constant cost.
Balancing = Literal["none", "batches", "windows", "rank 0", "sampler", "budget"]


@dataclass
class OptimizationArgs:
    """How gradients become updates; tables that train themselves in the backward pass follow the schedule alone."""

    accumulation_steps: int = 1  # steps whose gradients make one update, weighed by their loss terms
    # Norm to which the gradient of the dense parameters is clipped; None for no limit.
    max_grad_norm: float | None = None
    warmup_steps: int = 0  # updates in which learning rates rise linearly from 0; rows, with schedule_in "rows"
    # What learning rates do then: stay, or fall to min_lr_ratio at the end of the run.
    lr_schedule: Literal["constant", "cosine"] = "constant"
    min_lr_ratio: float = 0.0  # where the cosine ends, as a part of the learning rate

    def __post_init__(self) -> None:
        require_at_least("accumulation_steps", self.accumulation_steps, 1)
        require_at_least("warmup_steps", self.warmup_steps, 0)
        if self.max_grad_norm is not None:
            require_positive("max_grad_norm", self.max_grad_norm, "a norm is positive: raise it, or leave it out")
        if isinstance(self.min_lr_ratio, bool) or not 0 <= self.min_lr_ratio <= 1:
            raise ValueError(f"min_lr_ratio is {self.min_lr_ratio}; it is a part of the learning rate: give 0 to 1")


@dataclass
class TrainerArgs:
    """How a model is trained.

    Training ends after `num_epochs` epochs or `max_train_iters` steps, whichever comes first; where neither is given,
    after one epoch.
    """

    train_batch_size: int
    """Rows per batch and rank in training."""

    eval_batch_size: int
    """Rows per batch and rank in evaluation."""

    num_epochs: int | None = None
    """Epochs to train; None for as many as max_train_iters needs."""

    max_train_iters: int | None = None
    """Steps to train; None for no limit. Rows, with schedule_in "rows": the last step is the one that reaches them."""

    eval_interval: int = 100
    """Steps between evaluations; there is another one at the end. Rows, with schedule_in "rows"."""

    max_eval_iters: int | None = None
    """Batches of an evaluation on every rank, so that more ranks evaluate more rows; None for all rows of the data
    set, which are the same on any number of ranks."""

    log_interval: int = 100
    """Steps between lines of log.jsonl."""

    run_dir: str = "runs/train"
    """Folder for log.jsonl, traces and the logs of failed ranks, made if missing. One that holds a run is refused,
    unless this run goes on with it (ckpt_load_dir)."""

    overwrite: bool = False
    """Remove the run that run_dir holds, and start afresh; checkpoints stay."""

    seed: int = 1234
    """Seed of weights, dropout and the order of the data."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where ranks run; "auto" takes GPUs where every rank can have one, else the CPU."""

    pipeline_type: str = "native"
    """Name of a pipeline of TrainPipelineFactory; "prefetch", "fused" and "semi_sync" need CUDA."""

    enable_balanced_shuffler: bool = False
    """Train balanced batches."""

    shuffle_eval: bool = False
    """Balance the batches of evaluations too."""

    shuffler: ShufflerOptions = field(default_factory=ShufflerOptions)
    """How batches are balanced."""

    optimization: OptimizationArgs = field(default_factory=OptimizationArgs)
    """Accumulation, clipping and the schedule of learning rates."""

    top_k_for_generation: int = 10
    """Items that a model which generates them finds for every user: the width of its beam."""

    eval_metrics: tuple[str, ...] = ("HitRate@2", "NDCG@10")
    """What retrieval and generation are judged by: HR@K (or HitRate@K) and NDCG@K, generation by Recall@K too."""

    peak_tflops: float | None = None
    """Peak rate of a device in TFLOPS, of which MFU is a fraction; None looks it up. Unknown devices have no MFU."""

    sinks: tuple[SinkName, ...] = ("tensorboard",)
    """Where rank 0 sends the numbers of log.jsonl too: "tensorboard" writes run_dir/tensorboard, each of the others
    needs the extra of its name: pip install 'evenrank[prometheus]'."""

    sink_options: SinkOptions = field(default_factory=SinkOptions)
    """Settings of the sinks, a table each."""

    profile: bool = False
    """Record a trace of the steps from profile_step_start to profile_step_end."""

    profile_step_start: int = 100
    """First step of the trace, counted from 0."""

    profile_step_end: int = 200
    """The step after its last."""

    ckpt_save_interval: int = -1
    """Steps between checkpoints; there is another one at the end. -1 for none, also after SIGTERM. Rows, with
    schedule_in "rows"."""

    ckpt_save_dir: str = "./checkpoints"
    """Folder for the checkpoints of this run alone, on a disk that all ranks share. SIGTERM saves one there and ends
    the run with status 0."""

    ckpt_load_dir: str = ""
    """Checkpoint to go on from, or a folder of them, whose latest whole one is taken; empty for none. With the folder
    of ckpt_save_dir, one command starts a run, as long as that is empty, and later goes on with it. torch pickles a
    checkpoint's metadata: load only what you trust."""

    ckpt_keep: int = 3
    """Checkpoints to keep; older ones are removed."""

    single_rank_load: bool = False
    """Rank 0 alone loads training batches, of train_batch_size rows for every rank, and sends each rank its rows."""

    balance_batch: bool = False
    """With single_rank_load: deal rows out by their work, instead of one to each rank in turn. Where every rank loads
    its own rows, enable_balanced_shuffler balances them."""

    shuffle_window: int = 1
    """Batches whose rows are balanced together, over ranks and steps: heavy rows of one find room in the others. With
    enable_balanced_shuffler windows are exchanged on the host, which holds about two of them; with balance_sampler
    nothing is exchanged. 1 balances every batch by itself. It changes which rows share a step, but neither the size of
    a step nor that every row is trained once per epoch."""

    balance_sampler: bool = False
    """Read rows by their work: all lengths are known beforehand, the shuffler computes what rows of these lengths cost,
    every rank computes the same plan and reads its own rows, and none is exchanged. The shuffler then only observes.
    Not for random data, and instead of enable_balanced_shuffler."""

    budget_per_rank: float | None = None
    """With balance_sampler: steps of constant cost, in which every rank gets as much work as this many rows cost on
    average. train_batch_size is then the most rows of a rank's step. Needs shuffler.equal_size false. None: steps of
    train_batch_size rows per rank."""

    schedule_in: Literal["steps", "rows"] = "steps"
    """What max_train_iters, eval_interval, ckpt_save_interval and warmup_steps count, and what the cosine follows:
    steps, or rows of all ranks together. What is due after so many rows comes after the step that reaches them.
    log_interval and the trace count steps."""

    global_batch_size: int | None = None
    """Rows of a training step over all ranks together, of which every rank trains an equal part, instead of
    train_batch_size. A run that goes on with fewer or more ranks then makes the same steps. None: train_batch_size on
    every rank."""

    def __post_init__(self) -> None:
        for name in ("train_batch_size", "eval_batch_size", "eval_interval", "log_interval", "shuffle_window"):
            require_at_least(name, getattr(self, name), 1)
        for name in ("top_k_for_generation", "ckpt_keep"):
            require_at_least(name, getattr(self, name), 1)
        for name in ("global_batch_size", "num_epochs", "max_train_iters", "max_eval_iters"):
            if getattr(self, name) is not None:
                require_at_least(name, getattr(self, name), 1)
        for name in ("seed", "profile_step_start", "profile_step_end"):
            require_at_least(name, getattr(self, name), 0)
        if self.ckpt_save_interval != -1:
            require_at_least("ckpt_save_interval", self.ckpt_save_interval, 1)
            in_steps = self.schedule_in == "steps"  # in rows, it waits for the end of an accumulation
            if in_steps and self.ckpt_save_interval % self.optimization.accumulation_steps:
                raise ValueError(
                    f"ckpt_save_interval is {self.ckpt_save_interval}, accumulation_steps is "
                    f"{self.optimization.accumulation_steps}; a checkpoint holds no half-accumulated gradient: give a "
                    "multiple"
                )
        if not self.ckpt_save_dir:
            raise ValueError(
                "ckpt_save_dir is empty; it names a folder: for no checkpoints, leave ckpt_save_interval -1"
            )
        if self.overwrite and self.ckpt_load_dir:
            raise ValueError(
                f"overwrite is True and ckpt_load_dir is {self.ckpt_load_dir!r}; one removes the run in run_dir, the "
                "other goes on with it: give one of them, or another run_dir"
            )
        if self.peak_tflops is not None:
            require_positive(
                "peak_tflops", self.peak_tflops, "it is the positive rate of a device's data sheet: correct it"
            )
        unknown = [name for name in self.sinks if name not in get_args(SinkName)]
        if unknown:
            raise ValueError(f"sinks has {unknown[0]!r}; there are {', '.join(get_args(SinkName))}: choose of these")
        if self.profile_step_end <= self.profile_step_start:
            raise ValueError(
                f"profile_step_end is {self.profile_step_end}, profile_step_start is {self.profile_step_start}; a "
                "trace ends after it starts: raise profile_step_end"
            )
        from commons.pipeline import TrainPipelineFactory  # here: TorchRec is not needed to read a config

        pipelines = TrainPipelineFactory.list_available()
        if self.pipeline_type not in pipelines:
            raise ValueError(
                f"pipeline_type is {self.pipeline_type!r}; registered are {', '.join(map(repr, pipelines))}: "
                "choose one, or register it with TrainPipelineFactory"
            )
        if self.shuffle_eval and not self.enable_balanced_shuffler:
            raise ValueError(
                "shuffle_eval is True and enable_balanced_shuffler is False; evaluation is balanced by the shuffler of "
                "training: enable it too"
            )
        if self.balance_batch and not self.single_rank_load:
            raise ValueError(
                "balance_batch is True and single_rank_load is False; it balances what a single rank loads: set "
                "enable_balanced_shuffler instead, which balances what all ranks load, or set single_rank_load too"
            )
        for name, who in (("balance_batch", "rank 0 has dealt out"), ("balance_sampler", "every rank has read")):
            if getattr(self, name) and self.enable_balanced_shuffler:
                raise ValueError(
                    f"{name} and enable_balanced_shuffler are both True; rows that {who} by their work need no "
                    "shuffle: set one of them"
                )
        self._check_balancing_beyond_a_batch()
        for name in ("eval_interval", "ckpt_save_interval"):
            if self.schedule_in == "rows" and 0 < getattr(self, name) < self.train_batch_size:
                raise ValueError(
                    f"{name} is {getattr(self, name)}, schedule_in is 'rows' and train_batch_size is "
                    f"{self.train_batch_size}; it would be due after every step: count it in rows of all ranks together"
                )

    @property
    def balancing(self) -> Balancing:
        """What makes the ranks even, by the settings that say so."""
        if self.balance_sampler:
            return "sampler" if self.budget_per_rank is None else "budget"
        if self.balance_batch:
            return "rank 0"
        if self.enable_balanced_shuffler:
            return "batches" if self.shuffle_window == 1 else "windows"
        return "none"

    @property
    def balances_at_loading(self) -> bool:
        """Whether rows come to the ranks evenly, so that a shuffler has nothing to move."""
        return self.balancing in ("rank 0", "sampler", "budget")

    def _check_balancing_beyond_a_batch(self) -> None:
        if self.single_rank_load and (self.balance_sampler or self.shuffle_window > 1):
            asked = "balance_sampler is True" if self.balance_sampler else f"shuffle_window is {self.shuffle_window}"
            raise ValueError(
                f"single_rank_load and {asked}; rank 0 deals out every batch by itself: set balance_batch, or let "
                "every rank load its own rows"
            )
        if self.shuffle_window > 1 and not (self.balance_sampler or self.enable_balanced_shuffler):
            raise ValueError(
                f"shuffle_window is {self.shuffle_window} and nothing is balanced; a window is what is balanced "
                "together: set enable_balanced_shuffler or balance_sampler too, or leave shuffle_window 1"
            )
        if self.budget_per_rank is None:
            return
        require_positive("budget_per_rank", self.budget_per_rank, "it is a positive number of average rows: correct it")
        if not self.balance_sampler or self.shuffle_window > 1:
            raise ValueError(
                f"budget_per_rank is {self.budget_per_rank}, balance_sampler is {self.balance_sampler} and "
                f"shuffle_window is {self.shuffle_window}; the sampler fills one step after another: set "
                "balance_sampler, and leave shuffle_window 1"
            )
        if self.shuffler.equal_size:
            raise ValueError(
                f"budget_per_rank is {self.budget_per_rank} and shuffler.equal_size is True; a rank gets as many rows "
                "as its budget has room for, not as many as the others: set shuffler.equal_size to false"
            )


@dataclass
class DatasetArgs:
    """The data that a model is trained on.

    The longest sequence of an interleaved HSTU model has 2 · max_history_seqlen + 2 · max_num_candidates tokens and one
    for each contextual feature.
    """

    dataset_name: str
    """ml-1m, ml-20m, kuairand-pure, kuairand-1k, kuairand-27k, random, or parquet for files of your own; SID-GR takes
    sid and sid-<one of the first five>."""

    max_history_seqlen: int
    """The most items of a history; older ones are cut off. Random data draw history and candidates together, at most
    max_history_seqlen + max_num_candidates."""

    dataset_path: str | None = None
    """The preprocessed file, or its folder; random data needs none."""

    max_num_candidates: int = 0
    """The most candidates per row; 0 gives every item of the history a label."""

    shuffle: bool = False
    """A new order in every epoch of training."""

    drop_last: bool = False
    """Leave out an incomplete last batch of training."""

    num_workers: int = 0
    """Processes per rank that assemble batches; 0 for none."""

    num_tasks: int = 1
    """Labels per candidate, or per item without candidates; retrieval, which predicts items, has none."""

    num_batches: int = 100
    """Batches per rank and epoch of random data; files have as many as they have."""

    length_distribution: LengthDistribution = field(default_factory=LengthDistribution)
    """How long the rows of random data are; files have the lengths that they have."""

    columns: EventColumns = field(default_factory=EventColumns)
    """With dataset_name "parquet": which column plays which part."""

    def __post_init__(self) -> None:
        if not self.dataset_name:
            raise ValueError("dataset_name is empty; it names a data set: give 'random' or another known one")
        for name, least in (("max_history_seqlen", 1), ("max_num_candidates", 0), ("num_workers", 0)):
            require_at_least(name, getattr(self, name), least)
        for name in ("num_tasks", "num_batches"):
            require_at_least(name, getattr(self, name), 1)
        if self.length_distribution != LengthDistribution() and self.dataset_name not in RANDOM_DATASETS:
            raise ValueError(
                f"length_distribution is set and dataset_name is {self.dataset_name!r}; a file has the lengths that it "
                f"has: remove it, or choose {' or '.join(map(repr, RANDOM_DATASETS))}"
            )
        if self.columns.is_given and self.dataset_name != "parquet":
            raise ValueError(
                f"columns are given and dataset_name is {self.dataset_name!r}; they say what the parquet files of "
                "dataset_name 'parquet' hold: remove them, or set dataset_name to 'parquet'"
            )

    def loader_options(self) -> dict[str, Any]:
        """Further arguments of `get_data_loader` for this kind of data."""
        if self.dataset_name in RANDOM_DATASETS:
            return {"num_batches": self.num_batches, "length_distribution": self.length_distribution}
        return {"columns": self.columns} if self.columns.is_given else {}


def require_positive(name: str, value: Any, rule: str) -> None:
    """Raise ValueError, with the rule and its remedy, unless a value is a finite number above 0.

    >>> require_positive("lr", float("nan"), "a learning rate is positive: raise it")
    Traceback (most recent call last):
        ...
    ValueError: lr is nan; a learning rate is positive: raise it
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (is_number and 0 < value <= sys.float_info.max):
        raise ValueError(f"{name} is {value!r}; {rule}")
