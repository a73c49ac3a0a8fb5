"""Fields of a config by their path, and what to write for one that does not exist."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

# Where recsys-examples' sections and fields are set here; docs/from_recsys_examples.md says more of each. Names that
# only stand in another section are found without this table.
_RECSYS_SECTIONS = {
    "TrainerArgs": "trainer",
    "DatasetArgs": "dataset",
    "BenchmarkDatasetArgs": "dataset",
    "FeatureArgs": "dataset",
    "NetworkArgs": "model",
    "RankingArgs": "model",
    "RetrievalArgs": "model",
    "TensorModelParallelArgs": "model",
    "OptimizerArgs": "optimizer",
    "EmbeddingArgs": "optimizer",
    "DynamicEmbeddingArgs": "optimizer",
}
_RECSYS_FIELDS = {
    "adam_beta1": "optimizer.adam_betas",
    "adam_beta2": "optimizer.adam_betas",
    "dataset_type_str": "dataset.dataset_name",
    "dtype_str": "model.compute_dtype",
    "hidden_dropout": "model.dropout",
    "item_to_sid_mapping_path": "sid.map_path",
    "learning_rate": "optimizer.dense_lr",
    "log_dir": "trainer.run_dir",
    "max_candidate_length": "dataset.max_num_candidates",
    "max_history_length": "dataset.max_history_seqlen",
    "max_sequence_length": "dataset.max_history_seqlen",
    "num_generated_batches": "dataset.num_batches",
    "num_hierarchies": "sid.codebook_sizes",
    "num_position_buckets": "model.position_buckets",
    "optimizer_str": "optimizer.dense_optimizer",
    "recompute_input_layernorm": "model.activation_checkpointing",
    "recompute_input_silu": "model.activation_checkpointing",
    "seqlen_dist": "dataset.length_distribution",
    "sequence_features_testing_data_path": "dataset.dataset_path",
    "sequence_features_training_data_path": "dataset.dataset_path",
    "share_lm_head_across_hierarchies": "model.heads",
    "sharding_type": "optimizer.sharding",
}


def field_paths(config_class: Any) -> list[str]:
    """Paths of all fields, those of nested dataclasses below theirs.

    >>> @dataclasses.dataclass
    ... class Inner:
    ...     width: int
    >>> field_paths(dataclasses.make_dataclass("Outer", [("seed", int), ("model", Inner)]))
    ['seed', 'model', 'model.width']
    """
    hints = typing.get_type_hints(config_class)
    paths = []
    for name in _names(config_class):
        paths.append(name)
        nested = _dataclass_in(hints[name])
        if nested is not None:
            paths += [f"{name}.{path}" for path in field_paths(nested)]
    return paths


def require_known_fields(config_class: Any, content: Mapping[str, Any]) -> None:
    """Raise ValueError with all fields that the dataclass does not have; dacite stops at the first."""
    paths = field_paths(config_class)
    unknown = list(_unknown(config_class, content, paths, prefix=""))
    if not unknown:
        return
    said = [f"{path} ({'remove it' if written is None else f'write {written}'})" for path, written in unknown]
    without = [path for path, written in unknown if written is None]
    for section in dict.fromkeys(path.rpartition(".")[0] for path in without):
        valid = [path.removeprefix(f"{section}.") for path in paths if path.rpartition(".")[0] == section]
        if valid:
            said.append(f"{section or 'the config'} has {', '.join(valid)}")
    raise ValueError(f"{'this field does' if len(unknown) == 1 else 'these fields do'} not exist: {'; '.join(said)}")


def missing_fields(config_class: Any, content: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Paths of all fields that have no default and no value; dacite stops at the first."""
    hints = typing.get_type_hints(config_class)
    missing = []
    for field in dataclasses.fields(config_class):
        path, nested = f"{prefix}{field.name}", _dataclass_in(hints[field.name])
        if field.name in content:
            value = content[field.name]
            missing += missing_fields(nested, value, f"{path}.") if nested and isinstance(value, Mapping) else []
        elif field.init and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            missing.append(path)
    return missing


def renamed_path(path: str, paths: list[str]) -> str | None:
    """Where a field is set that has another name in recsys-examples, or stands in another section; None if unknown.

    >>> paths = ["trainer.seed", "model.dropout"]
    >>> [renamed_path(path, paths) for path in ("model.hidden_dropout", "seed", "trainer.sed")]
    ['model.dropout', 'trainer.seed', None]
    """
    name = path.rpartition(".")[2]
    if _RECSYS_FIELDS.get(name) in paths:
        return _RECSYS_FIELDS[name]
    elsewhere = [each for each in paths if each.rpartition(".")[2] == name]
    return elsewhere[0] if len(elsewhere) == 1 else None


def _replacement_of(path: str, paths: list[str]) -> str | None:
    """The path to write for one that is not among `paths`; None where nothing comes near it."""
    section, _, name = path.rpartition(".")
    siblings = {each.rpartition(".")[2]: each for each in paths if each.rpartition(".")[0] == section}
    close = difflib.get_close_matches(name, siblings, n=1)
    return renamed_path(path, paths) or (siblings[close[0]] if close else None)


def _unknown(
    config_class: Any, content: Mapping[str, Any], paths: list[str], prefix: str
) -> Iterator[tuple[str, str | None]]:
    """Paths of the file that are none of the config, each with the one to write for it."""
    hints = typing.get_type_hints(config_class)
    valid = _names(config_class)
    for name, value in content.items():
        path = f"{prefix}{name}"
        if name in valid:
            nested = _dataclass_in(hints[name])
            if nested is not None and isinstance(value, Mapping):
                yield from _unknown(nested, value, paths, prefix=f"{path}.")
        elif name in _RECSYS_SECTIONS and not prefix:
            section = _RECSYS_SECTIONS[name]
            yield path, section
            for inner in value if isinstance(value, Mapping) else ():
                if f"{section}.{inner}" not in paths:
                    yield f"{path}.{inner}", _replacement_of(f"{section}.{inner}", paths)
        else:
            yield path, _replacement_of(path, paths)


def _names(config_class: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(config_class) if field.init]


def _dataclass_in(hint: Any) -> Any:
    """The dataclass that a type is, or that it is together with None; None for other types."""
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    found = [option for option in options if dataclasses.is_dataclass(option)]
    return found[0] if len(found) == 1 else None
