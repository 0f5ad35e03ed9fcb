"""The hooks that torch keeps at modules, tensors and optimizers: it has no public list of them."""

from __future__ import annotations

from typing import Any

_KINDS = (
    "forward_pre",
    "forward",
    "backward_pre",
    "backward",
    "post_accumulate_grad",
    "state_dict_pre",
    "state_dict",
    "load_state_dict_pre",
    "load_state_dict_post",
    "optimizer_step_pre",
    "optimizer_step_post",
    "global_optimizer_pre",
    "global_optimizer_post",
)


def hooks_on(owner: Any) -> dict[str, Any]:
    """The registries of hooks that are not empty, by kind: ``hooks_on(model)["forward_pre"]``.

    Args:
        owner: module, tensor or optimizer; ``torch.optim.optimizer`` for those of all optimizers.
    """
    found = {kind: getattr(owner, f"_{kind}_hooks", None) for kind in _KINDS}
    return {kind: registry for kind, registry in found.items() if registry}
