# The built core; csrc/python/bindings.cpp says what is in it.
from typing import Any

def __getattr__(name: str) -> Any: ...
