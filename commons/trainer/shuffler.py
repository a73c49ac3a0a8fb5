"""The shuffler that a run's settings name, also one of the user's own."""

from __future__ import annotations

from collections.abc import Sequence

from commons.distributed.batch_shuffler_factory import BatchShufflerFactory
from commons.user_package import import_user_modules


def require_shuffler(name: str, imports: Sequence[str] = ()) -> None:
    """Import the user's modules, then raise ValueError unless a shuffler of this name is registered.

    Raises:
        ValueError: a module that cannot be imported, or an unknown name.
    """
    import_user_modules(imports)
    if not BatchShufflerFactory.is_registered(name):
        raise ValueError(
            f"shuffler_type is {name!r}; registered are {', '.join(sorted(BatchShufflerFactory.list_available()))}: "
            "choose one, or name with --import the module that registers yours"
        )
