"""The rules between the settings of TrainerArgs; each function raises ValueError with the remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from commons.checks import require_at_least, require_positive

if TYPE_CHECKING:
    from commons.trainer.config.args import TrainerArgs


def require_trace_and_peak(args: TrainerArgs) -> None:
    """Require a trace that ends after it starts, and a peak of a device."""
    if args.profile_step_end <= args.profile_step_start:
        raise ValueError(
            f"profile_step_end is {args.profile_step_end}, profile_step_start is {args.profile_step_start}; a "
            "trace ends after it starts: raise profile_step_end"
        )
    if args.peak_tflops is not None:
        rule = "it is the positive rate of a data sheet, at most 1e9, in 10^12 operations per second: correct it"
        require_positive("peak_tflops", args.peak_tflops, rule, most=1e9)


def require_folders(args: TrainerArgs) -> None:
    """Require names of the folders that a run writes, and not both to remove and to continue a run."""
    if not args.run_dir:  # such as an unset variable of a shell; an empty path is the working directory
        raise ValueError("run_dir is empty; it is the folder of the run, where its files are written: give one")
    if not args.ckpt_save_dir:
        raise ValueError(
            "ckpt_save_dir is empty; it is a folder: give one, and for no checkpoints leave ckpt_save_interval -1"
        )
    if args.overwrite and args.ckpt_load_dir:
        raise ValueError(
            f"overwrite is True and ckpt_load_dir is {args.ckpt_load_dir!r}; overwrite removes the run in run_dir, "
            "ckpt_load_dir continues it: give one of the two, or another run_dir"
        )


def require_pipeline(args: TrainerArgs) -> None:
    """Require a registered pipeline."""
    from commons.pipeline import TrainPipelineFactory  # imported here: reading a config does not need TorchRec

    pipelines = TrainPipelineFactory.list_available()
    if args.pipeline_type not in pipelines:
        raise ValueError(
            f"pipeline_type is {args.pipeline_type!r}; registered are {', '.join(map(repr, pipelines))}: "
            "choose one, or register it with TrainPipelineFactory"
        )


def require_one_balancer(args: TrainerArgs) -> None:
    """Require that at most one of shuffler, rank 0 and sampler balances, with options that it keeps."""
    if args.shuffle_eval and not args.enable_balanced_shuffler:
        raise ValueError(
            "shuffle_eval is True and enable_balanced_shuffler is False; the training's shuffler balances "
            "evaluations: enable it too"
        )
    if args.balance_batch and not args.single_rank_load:
        raise ValueError(
            "balance_batch is True and single_rank_load is False; balance_batch balances the rows that rank 0 "
            "loads: set single_rank_load too, or enable_balanced_shuffler instead if every rank loads its own rows"
        )
    if args.balance_batch and args.shuffler.max_tokens_per_rank is not None:
        raise ValueError(
            f"balance_batch is True and shuffler.max_tokens_per_rank is {args.shuffler.max_tokens_per_rank}; "
            "rank 0 balances workloads and keeps no cap: leave the cap out, or set enable_balanced_shuffler instead"
        )
    for name, who in (("balance_batch", "rank 0"), ("balance_sampler", "the sampler")):
        if getattr(args, name) and args.enable_balanced_shuffler:
            raise ValueError(
                f"{name} and enable_balanced_shuffler are both True; {who} balances the rows, so they need no "
                "shuffle: set one of them"
            )
    if args.balances_at_loading and args.shuffler.mode == "off" and args.shuffler.calibration is not None:
        raise ValueError(
            f"shuffler.mode is 'off' and shuffler.calibration is {args.shuffler.calibration!r}; a shuffler in mode "
            "'off' reads no calibration, so rows would be balanced by operations: leave out one of the two"
        )
    if args.balances_at_loading and args.shuffler.speeds == "measured":
        raise ValueError(
            f"{'balance_sampler' if args.balance_sampler else 'balance_batch'} is True and shuffler.speeds is "
            "'measured'; rows are balanced when they are loaded, with equal speeds: set enable_balanced_shuffler "
            "instead, or shuffler.speeds to 'observe' to see what speeds would gain"
        )


def require_windows_and_budget(args: TrainerArgs) -> None:
    """Require for windows and for steps of constant cost the balancer and the options that they need."""
    if args.single_rank_load and (args.balance_sampler or args.shuffle_window > 1):
        other = "balance_sampler is True" if args.balance_sampler else f"shuffle_window is {args.shuffle_window}"
        raise ValueError(
            f"single_rank_load is True and {other}; rank 0 distributes every batch separately: set balance_batch "
            "instead, or let every rank load its own rows"
        )
    if args.shuffle_window > 1 and not (args.balance_sampler or args.enable_balanced_shuffler):
        raise ValueError(
            f"shuffle_window is {args.shuffle_window} and balancing is off; a window is the batches that are "
            "balanced together: set enable_balanced_shuffler or balance_sampler too, or leave shuffle_window 1"
        )
    if args.budget_per_rank is None:
        if args.balance_sampler and not args.shuffler.equal_size:
            raise ValueError(
                "balance_sampler is True, budget_per_rank is None and shuffler.equal_size is False; without a "
                "budget every rank reads equally many rows: set budget_per_rank, or leave equal_size True"
            )
        return
    if not args.balance_sampler or args.shuffle_window > 1:
        raise ValueError(
            f"budget_per_rank is {args.budget_per_rank}, balance_sampler is {args.balance_sampler} and "
            f"shuffle_window is {args.shuffle_window}; the sampler fills one step after another: set "
            "balance_sampler, and leave shuffle_window 1"
        )
    if args.shuffler.equal_size:
        raise ValueError(
            f"budget_per_rank is {args.budget_per_rank} and shuffler.equal_size is True; with a budget, ranks get "
            "different numbers of rows: set shuffler.equal_size to false"
        )


def require_intervals(args: TrainerArgs) -> None:
    """Require intervals at whose ends a checkpoint or an evaluation can follow."""
    if args.ckpt_save_interval != -1:
        require_at_least("ckpt_save_interval", args.ckpt_save_interval, 1)
    accumulation = args.optimization.accumulation_steps
    if args.schedule_in == "steps":
        if args.ckpt_save_interval > 0 and args.ckpt_save_interval % accumulation:
            raise ValueError(
                f"ckpt_save_interval is {args.ckpt_save_interval}, accumulation_steps is {accumulation}; a checkpoint "
                "cannot contain a half-accumulated gradient: give a multiple"
            )
        return
    # A checkpoint waits for the end of the accumulation. With a budget, rows per step are only an upper limit.
    least_rows = 1 if args.balancing == "budget" else args.global_batch_size or args.train_batch_size
    for name in ("eval_interval", "ckpt_save_interval"):
        interval = getattr(args, name)
        if 0 < interval < least_rows:
            raise ValueError(
                f"{name} is {interval}, schedule_in is 'rows' and a step has {least_rows} rows or more; "
                "it would be due after every step: give a number of rows over all ranks"
            )
