"""Puts the sanitized core in the place of the installed one, in every interpreter that has this folder on its path."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys


class Sanitized(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "phalanx._core":
            return None
        file = os.environ["SANITIZED_CORE"]
        loader = importlib.machinery.ExtensionFileLoader(name, file)
        return importlib.util.spec_from_file_location(name, file, loader=loader)


sys.meta_path.insert(0, Sanitized())
