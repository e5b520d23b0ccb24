"""Pickle what a notebook holds; no torch is imported unless it already is."""

from __future__ import annotations

import io
import pickle
import sys
from typing import Any

import cloudpickle

from ddip.protocol.text import readable


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, with tensors of an accelerator written as tensors of the CPU."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.moved = False

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.Tensor) and is_elsewhere(obj):
            self.moved = True
            if not isinstance(obj, torch.nn.Parameter):  # it reduces to its data, a tensor that comes here next
                there = obj.detach().cpu().requires_grad_(obj.requires_grad)
                return there.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if torch is not None and isinstance(obj, torch.UntypedStorage):  # torch 2.15 writes what it cannot read
            self.moved = self.moved or is_elsewhere(obj)
            return torch.Tensor.untyped_storage, (torch.empty(0, dtype=torch.uint8).set_(obj.cpu()),)
        if torch is not None and isinstance(obj, torch.Generator) and is_elsewhere(obj):
            where = f"a random generator of {obj.device}"
            raise pickle.PicklingError(
                f"{where} stays where its device is; send its get_state(), and set_state() it there"
            )
        return super().reducer_override(obj)


def is_elsewhere(obj: Any) -> bool:
    """Is a tensor, storage or generator of torch on an accelerator, which not every process has or counts alike?"""
    return obj.device.type not in ("cpu", "meta")


def dump_all(values: dict[str, Any]) -> tuple[dict[str, bytes], dict[str, str], list[str]]:
    """Pickle each of `values`; returns the bytes, the errors, and the names whose tensors moved to the CPU."""
    packed, errors, moved = {}, {}, []
    for name, value in values.items():
        file = io.BytesIO()
        pickler = Pickler(file)
        try:
            pickler.dump(value)
        except Exception as error:
            errors[name] = readable(f"{type(error).__name__}: {error}")
            continue
        packed[name] = file.getvalue()
        if pickler.moved:
            moved.append(name)
    return packed, errors, moved
