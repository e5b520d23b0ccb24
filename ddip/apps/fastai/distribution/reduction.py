"""Is a loss the mean over its items, or their sum? The gradients of the ranks are averaged, or added.

Losses of torch and fastai say so (``reduction``). Of others a trial finds out, on some items of the first batch: given
twice, they leave the gradient of a sum as it is, and halve that of a mean. What the trial changes is put back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from fastai.callback.mixup import MixHandler
from fastai.torch_core import apply as each
from torch import Tensor

from ddip.apps import rank_exchange
from ddip.apps.fastai.distribution import randomness
from ddip.apps.fastai.distribution.kept import Kept

Reduction = Literal["mean", "sum"]
Verdict = Literal["mean", "sum", "neither", "no gradient"]

ITEMS = 4
"""Of a batch, for the trial: enough, and no load for the memory."""
TOLERANCE = 0.02
"""Relative; numbers of bfloat16 have three digits."""
UNCLEAR = (
    "\x1b[90mfit: whether {} is a mean or a sum over the items cannot be told, so it is taken for a mean: the ranks' "
    'gradients are averaged. Say which it is before fit: learn.loss_func.reduction = "mean", or "sum"\x1b[0m'
)


class Reductions:
    """What the loss functions of one fit have been found to be."""

    def __init__(self) -> None:
        self._tried: Any = None
        self._found: Reduction | None = None
        self._unclear = ""
        self._said = False

    def of(self, loss_func: Any) -> Reduction:
        """The reduction of `loss_func`; a mean, while nothing is known."""
        found = self._found if loss_func is self._tried else None
        return stated(loss_func) or found or "mean"

    def find_out(self, loss_func: Any, pred: Any, yb: tuple[Any, ...]) -> None:
        """Try `loss_func` if it is not known; all ranks come here with their parts of one batch. A collective."""
        if stated(loss_func) or (loss_func is self._tried and self._found):
            return
        verdicts = set(rank_exchange.gather_objects(trial(loss_func, pred, yb))) - {"no gradient"}
        self._tried = loss_func
        self._found = None  # and tried again with the next batch, if nothing can be told from this one
        if verdicts:
            agreed = verdicts.pop() if len(verdicts) == 1 else "neither"
            self._found = "sum" if agreed == "sum" else "mean"
            self._unclear = getattr(loss_func, "__name__", type(loss_func).__name__) if agreed == "neither" else ""

    def say(self) -> None:
        """Tell once, on rank 0, what could not be found out: when the loss itself has been computed."""
        if self._unclear and not self._said:
            self._said = True
            if rank_exchange.rank() == 0:
                print(UNCLEAR.format(self._unclear))


def stated(loss_func: Any) -> Reduction | None:
    """What `loss_func` says of itself."""
    owner = getattr(loss_func, "__self__", None)
    if isinstance(owner, MixHandler):  # MixUp has put its own in the place of the learner's
        told: Any = getattr(owner.old_lf, "reduction", "mean")
    else:
        told = getattr(loss_func, "reduction", None)
    return "mean" if told == "mean" else "sum" if told == "sum" else None


def trial(loss_func: Callable[..., Any], pred: Any, yb: tuple[Any, ...]) -> Verdict:
    """What becomes of the gradient of some items when they are there twice."""
    kept, randoms = Kept(loss_func), randomness.State.now()
    try:
        rows = _rows((pred, *yb))
        loss, gradient = _loss_of(loss_func, pred, yb, rows, 1)
        kept.restore()
        randoms.restore()
        doubled, of_doubled = _loss_of(loss_func, pred, yb, rows, 2)
    except Exception:  # a loss that takes whole batches only; and where the loss itself is wrong, it tells by itself
        return "neither"
    finally:
        kept.restore()
        randoms.restore()
    size = gradient.norm()
    if not torch.isfinite(of_doubled).all() or not 0 < size < float("inf"):
        return "no gradient"
    growths: tuple[tuple[Reduction, int], ...] = ("mean", 1), ("sum", 2)
    for verdict, growth in growths:  # a sum and a penalty is neither: each rank would add the penalty
        is_value = abs(doubled - growth * loss) <= TOLERANCE * abs(loss)
        if is_value and (of_doubled - gradient * growth / 2).norm() <= TOLERANCE * size:
            return verdict
    return "neither"


def _rows(values: Any) -> int | None:
    """How many items to take of each tensor; None: all that there are."""
    lengths: set[int] = set()
    each(lambda value: lengths.add(len(value)) if _has_rows(value) else None, values)
    return ITEMS if len(lengths) == 1 else None


def _has_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0


def _loss_of(loss_func: Any, pred: Any, yb: Any, rows: int | None, times: int) -> tuple[float, Tensor]:
    """The loss of these items `times` over, and the gradient of the predictions for the first time."""
    leaves: list[tuple[Tensor, int]] = []

    def some(value: Any) -> Any:
        return torch.cat([value.detach()[:rows]] * times) if _has_rows(value) else value

    def leaf(value: Any) -> Any:
        value = some(value)
        if _has_rows(value) and value.is_floating_point():
            leaves.append((value.requires_grad_(), len(value) // times))
        return value

    with torch.enable_grad():
        loss = loss_func(each(leaf, pred), *[each(some, value) for value in yb])
        found = torch.autograd.grad(loss, [value for value, _ in leaves], allow_unused=True)
    parts = [
        torch.zeros_like(value[:count]) if gradient is None else gradient[:count]
        for gradient, (value, count) in zip(found, leaves, strict=True)
    ]
    return float(loss), torch.cat([part.detach().as_subclass(Tensor).flatten().double().cpu() for part in parts])
