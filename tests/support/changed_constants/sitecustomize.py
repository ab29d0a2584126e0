"""Read by each interpreter that starts with this directory on its PYTHONPATH: `realmount.change_constants`."""

from __future__ import annotations

import importlib
import json
import os

for _name, _value in json.loads(os.environ["TESTS_CONSTANTS"]).items():
    _module, _, _constant = _name.partition(":")
    _there = importlib.import_module(_module)
    assert hasattr(_there, _constant), f"{_name} is no constant any more"
    setattr(_there, _constant, _value)
