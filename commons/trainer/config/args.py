"""TrainerArgs and DatasetArgs: the settings of a training run, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from commons.checks import (
    Count,
    Natural,
    Positive,
    require_field_types,
    require_names,
    require_one_of,
    take_python_scalars,
)
from commons.datasets.random.distribution import RANDOM_DATASETS, LengthDistribution
from commons.datasets.sequences.event_columns import EventColumns
from commons.distributed.options import ShufflerOptions
from commons.trainer.config.rules import (
    require_folders,
    require_intervals,
    require_one_balancer,
    require_pipeline,
    require_trace_and_peak,
    require_windows_and_budget,
)
from commons.trainer.config.sink_options import SinkName, SinkOptions

# What balances the ranks: nothing; the shuffler, per batch or per window; rank 0, which assigns rows to ranks by their
# workloads; or the sampler, in steps of equal row counts or of constant cost.
Balancing = Literal["none", "batches", "windows", "rank 0", "sampler", "budget"]


@dataclass
class OptimizationArgs:
    """How gradients become updates. For tables that are updated in the backward pass only the schedule applies."""

    accumulation_steps: Count = 1  # steps whose gradients are accumulated for one update, weighted by their loss terms
    # Norm to which the gradient of the dense parameters is clipped; None for no limit.
    max_grad_norm: Positive | None = None
    warmup_steps: Natural = 0  # updates in which learning rates rise linearly from 0; rows, with schedule_in "rows"
    # Learning rates after the warmup: constant, or a cosine that falls to min_lr_ratio at the end of the run.
    lr_schedule: Literal["constant", "cosine"] = "constant"
    min_lr_ratio: float = 0.0  # end of the cosine, as a fraction of the learning rate

    def __post_init__(self) -> None:
        require_field_types(self)
        if isinstance(self.min_lr_ratio, bool) or not 0 <= self.min_lr_ratio <= 1:
            raise ValueError(f"min_lr_ratio is {self.min_lr_ratio}; it is a fraction of the learning rate: give 0 to 1")


@dataclass
class TrainerArgs:
    """How a model is trained.

    Training ends after `num_epochs` epochs or `max_train_iters` steps, whichever comes first; if neither is set, after
    one epoch.
    """

    train_batch_size: Count  # rows per batch and rank in training
    eval_batch_size: Count  # rows per batch and rank in evaluation
    num_epochs: Count | None = None  # epochs to train; None for the number that max_train_iters needs
    # Steps to train; None for no limit. Rows, with schedule_in "rows": the step that reaches the limit is the last.
    max_train_iters: Count | None = None
    # Steps between evaluations; a last evaluation follows the last step. Rows, with schedule_in "rows".
    eval_interval: Count = 100
    # Batches of an evaluation on every rank, so more ranks evaluate more rows; None for all rows of the data set, with
    # any number of ranks.
    max_eval_iters: Count | None = None
    log_interval: Count = 100  # steps between lines of log.jsonl; a checkpoint and the end of the run write one too
    # Folder for log.jsonl, traces and the logs of failed ranks, created if missing. A folder that already contains a
    # run is an error, unless this run continues that run (ckpt_load_dir).
    run_dir: str = "runs/train"
    overwrite: bool = False  # remove the run in run_dir and start a new run; checkpoints are kept
    seed: Natural = 1234  # seed of weights, dropout and the order of the data
    # Device of the ranks; "auto" uses GPUs if every rank can have its own GPU, else the CPU.
    device: Literal["auto", "cpu", "cuda"] = "auto"
    # Name of a pipeline of TrainPipelineFactory; "prefetch", "fused" and "semi_sync" need CUDA.
    pipeline_type: str = "native"
    # Balance the work of the ranks in every training batch: the shuffler exchanges rows between ranks.
    enable_balanced_shuffler: bool = False
    shuffle_eval: bool = False  # balance evaluation batches too
    shuffler: ShufflerOptions = field(default_factory=ShufflerOptions)  # options of the shuffler
    # Accumulation, clipping and the schedule of learning rates.
    optimization: OptimizationArgs = field(default_factory=OptimizationArgs)
    # Beam width of generative models: the number of items that they generate for every user.
    top_k_for_generation: Count = 10
    # Evaluation metrics of retrieval and generation: HR@K (or HitRate@K) and NDCG@K; for generation also Recall@K.
    eval_metrics: tuple[str, ...] = ("HitRate@2", "NDCG@10")
    # Peak of a device in TFLOPS, to which MFU relates; None takes it from a table. Unknown devices have no MFU.
    peak_tflops: float | None = None
    # Further outputs of rank 0 for the numbers of log.jsonl: "tensorboard" writes run_dir/tensorboard; every other sink
    # needs the extra of the same name, as in pip install 'evenrank[prometheus]'.
    sinks: tuple[SinkName, ...] = ("tensorboard",)
    sink_options: SinkOptions = field(default_factory=SinkOptions)  # settings of the sinks, one table per sink
    profile: bool = False  # record a trace of the steps from profile_step_start to profile_step_end
    profile_step_start: Natural = 100  # first step of the trace, counted from 0
    profile_step_end: Natural = 200  # the step after the last step of the trace
    # Steps between checkpoints; a last checkpoint follows the last step. -1 for no checkpoints, not even after SIGTERM.
    # Rows, with schedule_in "rows".
    ckpt_save_interval: int = -1
    # Folder for the checkpoints of this run only, on a disk that all ranks share. SIGTERM saves a checkpoint there and
    # ends the run with status 0.
    ckpt_save_dir: str = "./checkpoints"
    # Checkpoint from which to continue, or a folder of checkpoints, of which the latest complete one is loaded; empty
    # for a new run. If it equals ckpt_save_dir, the same command starts the run (the folder is empty) and later
    # continues it. torch pickles a checkpoint's metadata: load only checkpoints that you trust.
    ckpt_load_dir: str = ""
    ckpt_keep: Count = 3  # number of checkpoints to keep; older checkpoints are removed
    # Only rank 0 loads training batches, with train_batch_size rows for every rank, and sends each rank its rows.
    single_rank_load: bool = False
    # With single_rank_load: assign rows to ranks by their workloads, instead of to each rank in turn. If every rank
    # loads its own rows, set enable_balanced_shuffler instead.
    balance_batch: bool = False
    # Number of batches whose rows are balanced together, over ranks and steps: other batches of the window have room
    # for the heavy rows of one batch. With enable_balanced_shuffler, windows are exchanged on the host, which stores up
    # to four of them; with balance_sampler no row is exchanged. 1 balances every batch separately. A window changes
    # which rows share a step; the size of a step stays, and every row is still trained once per epoch.
    shuffle_window: Count = 1
    # Read rows by their workloads: the shuffler computes workloads from all lengths before the first epoch, every rank
    # computes the same plan and reads its own rows, so no row is exchanged. The shuffler then only observes. Not for
    # random data; replaces enable_balanced_shuffler.
    balance_sampler: bool = False
    # With balance_sampler: steps of constant cost. Every rank gets as much work as this number of average rows;
    # train_batch_size is then the maximum number of rows per rank and step. Requires shuffler.equal_size false. With a
    # cosine, every start plans all epochs that are left to count their steps, which takes about a second per million
    # rows; with schedule_in "rows" only if drop_last is set. None: steps of train_batch_size rows per rank.
    budget_per_rank: Positive | None = None
    # Unit of max_train_iters, eval_interval, ckpt_save_interval, warmup_steps and the cosine: steps, or rows of all
    # ranks together. With "rows", an evaluation or checkpoint follows the step that reaches the number of rows.
    # log_interval and the trace always count steps.
    schedule_in: Literal["steps", "rows"] = "steps"
    # Rows of a training step over all ranks together, instead of train_batch_size; every rank trains an equal part. A
    # run that continues with fewer or more ranks then has the same steps; with shuffle_window above 1, the same
    # windows; with budget_per_rank, other steps of at most these rows. None: train_batch_size rows on every rank.
    global_batch_size: Count | None = None

    def __post_init__(self) -> None:
        take_python_scalars(self)
        require_field_types(self)
        require_trace_and_peak(self)
        require_folders(self)
        self.eval_metrics = tuple(require_names("eval_metrics", self.eval_metrics))
        self.sinks = tuple(require_names("sinks", self.sinks))  # type: ignore[arg-type]  # the loop checks them
        for name in self.sinks:
            require_one_of("a name in sinks", name, get_args(SinkName))
        require_pipeline(self)
        require_one_balancer(self)
        require_windows_and_budget(self)
        require_intervals(self)

    @property
    def balancing(self) -> Balancing:
        """What balances the ranks, from the settings above."""
        if self.balance_sampler:
            return "sampler" if self.budget_per_rank is None else "budget"
        if self.balance_batch:
            return "rank 0"
        if self.enable_balanced_shuffler:
            return "batches" if self.shuffle_window == 1 else "windows"
        return "none"

    @property
    def balances_at_loading(self) -> bool:
        """Whether loading balances the ranks, so that a shuffler has nothing to move."""
        return self.balancing in ("rank 0", "sampler", "budget")


@dataclass
class DatasetArgs:
    """The data that a model is trained on.

    The longest sequence of an interleaved HSTU model has 2 · max_history_seqlen + 2 · max_num_candidates tokens, plus
    one token per contextual feature.
    """

    # ml-1m, ml-20m, kuairand-pure, kuairand-1k, kuairand-27k, random, or parquet for your own files; SID-GR accepts
    # sid, and sid-NAME with NAME one of the others.
    dataset_name: str
    # Maximum number of items in a history; older items are cut off. In HSTU's retrieval, the last of them is the item
    # that is predicted. In random data, history and candidates together have at most max_history_seqlen +
    # max_num_candidates items.
    max_history_seqlen: Count
    dataset_path: str | None = None  # the folder of the preprocessed data; None for random data
    # Maximum number of candidates per row; 0 for no candidates, so every item of the history has a label.
    max_num_candidates: Natural = 0
    shuffle: bool = False  # read the training data in a new order in every epoch
    drop_last: bool = False  # leave out the last rows of an epoch of training if they do not fill a batch on every rank
    # Number of processes per rank that assemble batches; 0 assembles them in the rank's own process.
    num_workers: Natural = 0
    # Labels per candidate, or per item without candidates; no effect on retrieval, which predicts items.
    num_tasks: Count = 1
    num_batches: Count = 100  # batches per rank and epoch of random data; no effect on files
    # Distribution of the row lengths of random data; only for random data.
    length_distribution: LengthDistribution = field(default_factory=LengthDistribution)
    # With dataset_name "parquet": the names of the columns of your files.
    columns: EventColumns = field(default_factory=EventColumns)

    def __post_init__(self) -> None:
        take_python_scalars(self)
        if not self.dataset_name:
            raise ValueError("dataset_name is empty; it names a data set: give 'random' or another known data set")
        require_field_types(self)
        if self.length_distribution != LengthDistribution() and self.dataset_name not in RANDOM_DATASETS:
            raise ValueError(
                f"length_distribution is set and dataset_name is {self.dataset_name!r}; only random data draw their "
                f"lengths: remove it, or choose {' or '.join(map(repr, RANDOM_DATASETS))}"
            )
        if self.columns.is_given and self.dataset_name != "parquet":
            raise ValueError(
                f"columns are given and dataset_name is {self.dataset_name!r}; columns are only for dataset_name "
                "'parquet': remove them, or set dataset_name to 'parquet'"
            )

    def loader_options(self) -> dict[str, Any]:
        """The keyword arguments for `get_data_loader` that say what the data are, not how they are read."""
        names = ["dataset_name", "dataset_path", "max_history_seqlen", "max_num_candidates", "num_tasks"]
        if self.dataset_name in RANDOM_DATASETS:
            names += ["num_batches", "length_distribution"]
        elif self.columns.is_given:
            names.append("columns")
        return {name: getattr(self, name) for name in names}
