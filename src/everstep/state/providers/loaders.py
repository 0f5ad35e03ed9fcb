"""Provider for loaders with a position: torchdata's, alone or within accelerate's."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from everstep.errors import OptionError
from everstep.state.loaders.positions import KEY, POSITIONS, adopt, is_followed, loader_within
from everstep.state.providers.provider import StatefulProvider

__all__ = ["LoaderProvider"]

_FINISHED = "_iterator_finished"
_ITERATION = "iteration"


class LoaderProvider(StatefulProvider):
    """A loader that :class:`.Positions` follows.

    accelerate puts a loader of its own around torchdata's. That one counts its epochs, which is in
    no state; it fetches a batch ahead, and keeps the state before that; and it says that an epoch
    is finished while its last batch is still trained on.
    """

    def __init__(self, section: str, value: Any) -> None:
        super().__init__(section, value)
        self._loader: Any = loader_within(value)
        self._outer: Any = None if self._loader is value else value
        adopt(self._loader, POSITIONS)

    @staticmethod
    def takes(value: object) -> bool:
        """Return whether a value is such a loader.

        Raises:
            OptionError: it is accelerate's around a loader without a position.
        """
        inner = loader_within(value)
        if inner is not value and isinstance(inner, DataLoader) and not is_followed(inner):
            raise OptionError(
                f"a {type(value).__name__} around torch's own DataLoader has no position",
                hint="Accelerator(dataloader_config=DataLoaderConfiguration("
                "use_stateful_dataloader=True)), or everstep.data.ResumableLoader",
            )
        return is_followed(inner)

    def collect(self) -> Any:
        if self._outer is None:
            return self._loader.state_dict()
        if self._loader._iterator is None:  # the outer one has the state of one that is gone
            tree = dict(self._loader.state_dict())
        else:
            tree = dict(self._outer.state_dict())
        iteration = self._outer.iteration
        if tree.get(_FINISHED) and self._is_iterated():
            # No batch is left, but the loop is still in this epoch, which ends without one more.
            tree[_FINISHED] = False
            iteration += 1
        return {**tree, KEY: {**tree.get(KEY, {}), _ITERATION: iteration}}

    def _is_iterated(self) -> bool:
        """Return whether a loop over accelerate's loader is under way."""
        under_way = self._outer.gradient_state.dataloader_references
        return any(one is self._outer for one in under_way)

    def restore(self, tree: Any, *, strict: bool) -> list[str]:
        notes = super().restore(tree, strict=strict)
        if self._outer is not None and isinstance(tree, dict):
            self._outer.iteration = tree.get(KEY, {}).get(_ITERATION, self._outer.iteration)
        return notes
