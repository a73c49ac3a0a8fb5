"""BatchShufflerFactory: shufflers by name; a model's package registers one, and a training script creates it."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from commons.checks import kind_of, require_name
from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler, IdentityBalancedBatchShuffler
from commons.distributed.tokens_shuffler import TokensBalancedBatchShuffler

# The entry-point group of installed packages with shufflers: `mine = "my_package.shuffler"` is a module that registers
# "mine", `mine = "my_package.shuffler:MyBatchShuffler"` the class itself.
ENTRY_POINTS = "evenrank.shufflers"

S = TypeVar("S", bound=type[BaseTaskBalancedBatchShuffler])


class BatchShufflerFactory:
    """Registry of shuffler classes; used through its class methods, never instantiated.

    "identity" and "tokens" are built in; "hstu" and "sid_gr" are registered when those packages are imported. Shufflers
    of other installed packages, in the entry-point group "evenrank.shufflers", are imported at their first use.

    Examples:
        >>> BatchShufflerFactory.is_registered("tokens")
        True
    """

    _registry: dict[str, type[BaseTaskBalancedBatchShuffler]] = {}

    def __init__(self) -> None:
        raise TypeError(
            f"{type(self).__name__} has class methods only and should not be instantiated: call "
            f"{type(self).__name__}.create(name)"
        )

    @classmethod
    def register(cls, name: str, shuffler_class: type[BaseTaskBalancedBatchShuffler]) -> None:
        """Register a class under a name.

        Raises:
            ValueError: the name is taken, or empty.
            TypeError: the class does not derive from BaseTaskBalancedBatchShuffler, or the name is not a string.
        """
        require_name(name, "batch shuffler", "my_model")
        if not (isinstance(shuffler_class, type) and issubclass(shuffler_class, BaseTaskBalancedBatchShuffler)):
            raise TypeError(
                f"{shuffler_class!r} is not a batch shuffler; a shuffler derives from BaseTaskBalancedBatchShuffler: "
                "make that the base class"
            )
        if name in cls._registry:
            raise ValueError(
                f"batch shuffler {name!r} is already registered as {cls._registry[name].__name__}; names are unique: "
                "choose another or unregister it first"
            )
        cls._registry[name] = shuffler_class

    @classmethod
    def unregister(cls, name: str) -> None:
        """Remove a name.

        Raises:
            KeyError: the name is unknown.
        """
        cls._get(name)
        del cls._registry[name]

    @classmethod
    def create(cls, name: str, **kwargs: Any) -> BaseTaskBalancedBatchShuffler:
        """Construct the shuffler of that name.

        Args:
            name: a registered name.
            **kwargs: arguments of its class.

        Raises:
            KeyError: the name is unknown.
        """
        return cls._get(name)(**kwargs)

    @classmethod
    def create_from_config(cls, config: Mapping[str, Any]) -> BaseTaskBalancedBatchShuffler:
        """Construct a shuffler from `{"type": name, ...arguments}`.

        Raises:
            KeyError: the config has no "type", or the type is unknown.
            TypeError: the config is not a dictionary.
        """
        if not isinstance(config, Mapping):
            raise TypeError(
                f"the shuffler config is {kind_of(config)}; it is a dictionary with the shuffler's name under "
                "'type': write {\"type\": name}, or call create(name)"
            )
        if "type" not in config:
            raise KeyError(
                f"the shuffler config has the keys {sorted(config)}; the name of the shuffler is under 'type': add it"
            )
        arguments = {key: value for key, value in config.items() if key != "type"}
        return cls.create(config["type"], **arguments)

    @classmethod
    def list_available(cls) -> dict[str, type[BaseTaskBalancedBatchShuffler]]:
        """All registered classes by name."""
        return dict(cls._registry)

    @classmethod
    def is_registered(cls, name: str) -> bool:
        """Whether a name is registered, or is an entry point of an installed package.

        Raises:
            ImportError: that package cannot be imported.
        """
        return name in cls._registry or cls._load_entry_point(name)

    @classmethod
    def clear_registry(cls) -> None:
        """Remove every name, including the built-in ones and those of imported packages; for tests.

        Importing the packages again does not register them again. Keep `list_available()` to restore the registry.

        Examples:
            >>> before = BatchShufflerFactory.list_available()
            >>> BatchShufflerFactory.clear_registry()
            >>> BatchShufflerFactory.list_available()
            {}
            >>> for name, shuffler_class in before.items():
            ...     BatchShufflerFactory.register(name, shuffler_class)
        """
        cls._registry.clear()

    @classmethod
    def _get(cls, name: str) -> type[BaseTaskBalancedBatchShuffler]:
        if not cls.is_registered(name):
            available = ", ".join(sorted(cls._registry)) or "none"
            raise KeyError(
                f"batch shuffler {name!r} is not registered. Available shufflers: {available}; import the package that "
                "registers it (import hstu registers 'hstu', import sid_gr 'sid_gr'), or register it"
            )
        return cls._registry[name]

    @classmethod
    def _load_entry_point(cls, name: str) -> bool:
        """Load the entry point of that name, if there is one; returns whether the name is registered now."""
        for entry_point in importlib.metadata.entry_points(group=ENTRY_POINTS, name=name):
            try:
                loaded = entry_point.load()
            except Exception as error:  # a package may raise anything at import
                raise ImportError(
                    f"batch shuffler {name!r} is {entry_point.value} of an installed package, which cannot be imported "
                    f"({type(error).__name__}: {error}): repair or uninstall it"
                ) from error
            if name not in cls._registry and isinstance(loaded, type):
                cls.register(name, loaded)
        return name in cls._registry


def register_batch_shuffler(name: str) -> Callable[[S], S]:
    """Class decorator that registers a shuffler under a name.

    Raises:
        ValueError: the name is taken, or empty.
        TypeError: the class does not derive from BaseTaskBalancedBatchShuffler, or the name is not a string.
    """
    require_name(name, "batch shuffler", "my_model")  # here, because `@register_batch_shuffler` calls nothing else

    def register(shuffler_class: S) -> S:
        BatchShufflerFactory.register(name, shuffler_class)
        return shuffler_class

    return register


BatchShufflerFactory.register("identity", IdentityBalancedBatchShuffler)
BatchShufflerFactory.register("tokens", TokensBalancedBatchShuffler)
