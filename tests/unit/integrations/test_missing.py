"""An integration whose library is not installed names the extra that installs it."""

from __future__ import annotations

import importlib
import sys

import pytest


@pytest.mark.parametrize("library", ["accelerate", "deepspeed", "lightning", "transformers"])
def test_the_extra_is_named(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"everstep.integrations.{library}", raising=False)
    with pytest.raises(ImportError, match=rf"pip install 'everstep\[{library}\]'"):
        importlib.import_module(f"everstep.integrations.{library}")
