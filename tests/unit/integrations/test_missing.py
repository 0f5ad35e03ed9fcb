"""An integration whose library is not installed names the extra that installs it."""

from __future__ import annotations

import importlib
import sys

import pytest


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "everstep.integrations.transformers", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'everstep\[transformers\]'"):
        importlib.import_module("everstep.integrations.transformers")
