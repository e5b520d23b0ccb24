"""Find out whether a loss is the mean or the sum over its items, that is, whether gradients are averaged or added.

Losses of torch and fastai have an attribute ``reduction``. For other losses, a trial on some items of the first batch
decides: if each item is given twice, the gradient per item of a sum is unchanged, and that of a mean is halved. State
that the trial changes is restored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from fastai.callback.mixup import MixHandler
from fastai.torch_core import apply as each
from torch import Tensor

from ddip.apps import rank_exchange
from ddip.apps.fastai.distribution.kept import SavedState
from ddip.sharded import contents

Reduction = Literal["mean", "sum"]
Verdict = Literal["mean", "sum", "neither", "no gradient"]

ITEMS = 4
"""Number of items of a batch for the trial; a few suffice and take little memory."""
TOLERANCE = 0.02
"""Relative tolerance; bfloat16 has two to three significant digits."""
UNCLEAR = (
    "\x1b[90mfit: ddip cannot determine whether {} is a mean or a sum over the items. It assumes a mean, and averages "
    'the ranks\' gradients. To choose, set before fit: learn.loss_func.reduction = "mean", or "sum"\x1b[0m'
)


class Reductions:
    """Determines whether a loss function of a fit averages or sums over the batch, if need be by a trial."""

    def __init__(self) -> None:
        self._tried_loss: Any = None
        self._found: Reduction | None = None
        self._unclear = ""
        self._reported = False

    def reduction_of(self, loss_func: Any) -> Reduction:
        """Return the reduction of `loss_func`; "mean" if it is unknown."""
        found = self._found if loss_func is self._tried_loss else None
        return stated_reduction(loss_func) or found or "mean"

    def determine(self, loss_func: Any, pred: Any, yb: tuple[Any, ...]) -> None:
        """Find out by a trial whether `loss_func` averages or adds, unless that is known; see `reduction_of`.

        The trial is a collective on the predictions `pred` and targets `yb`. If this batch does not decide, the next
        call tries again. If ranks disagree, the loss counts as a mean.
        """
        if stated_reduction(loss_func) or (loss_func is self._tried_loss and self._found):
            return
        verdicts = set(rank_exchange.gather_objects(try_reduction(loss_func, pred, yb))) - {"no gradient"}
        self._tried_loss = loss_func
        self._found = None  # if this batch decides nothing, the next one is tried
        if verdicts:
            agreed = verdicts.pop() if len(verdicts) == 1 else "neither"
            self._found = "sum" if agreed == "sum" else "mean"
            self._unclear = getattr(loss_func, "__name__", type(loss_func).__name__) if agreed == "neither" else ""

    def report_unclear(self) -> None:
        """If it is unknown whether the loss is a mean or a sum over the batch, say so once, on rank 0.

        It is called after the loss has been computed, so that an exception of the loss function is shown instead.
        """
        if self._unclear and not self._reported:
            self._reported = True
            if rank_exchange.rank() == 0:
                print(UNCLEAR.format(self._unclear))


def stated_reduction(loss_func: Any) -> Reduction | None:
    """Return the ``reduction`` that `loss_func` states, or None."""
    owner = getattr(loss_func, "__self__", None)
    if isinstance(owner, MixHandler):  # MixUp has replaced the learner's loss function
        value: Any = getattr(owner.old_lf, "reduction", "mean")
    else:
        value = getattr(loss_func, "reduction", None)
    return "mean" if value == "mean" else "sum" if value == "sum" else None


def try_reduction(loss_func: Callable[..., Any], pred: Any, yb: tuple[Any, ...]) -> Verdict:
    """Determine the reduction of a loss by trial, with a few of the predictions `pred` and targets `yb`.

    The value and gradient of the loss are compared with those of the same items repeated. The state of the loss
    function and of the random generators is restored. Never raises; for a loss that raises, returns "neither".
    """
    state, randoms = SavedState(loss_func), contents.process_generators()
    try:
        rows = _rows_to_take((pred, *yb))
        loss, gradient = _loss_of(loss_func, pred, yb, rows, 1)
        state.restore()
        contents.set_process_generators(randoms)
        doubled, doubled_gradient = _loss_of(loss_func, pred, yb, rows, 2)
    except Exception:  # the loss needs whole batches, or is wrong and will raise in the fit
        return "neither"
    finally:
        state.restore()
        contents.set_process_generators(randoms)
    size = gradient.norm()
    if not torch.isfinite(doubled_gradient).all() or not 0 < size < float("inf"):
        return "no gradient"
    growths: tuple[tuple[Reduction, int], ...] = ("mean", 1), ("sum", 2)
    for verdict, growth in growths:  # a sum plus a penalty is neither, as each rank would add the penalty
        is_value = abs(doubled - growth * loss) <= TOLERANCE * abs(loss)
        if is_value and (doubled_gradient - gradient * growth / 2).norm() <= TOLERANCE * size:
            return verdict
    return "neither"


def _rows_to_take(values: Any) -> int | None:
    """Return the number of items to take of each tensor; None for all, if lengths differ."""
    lengths: set[int] = set()
    each(lambda value: lengths.add(len(value)) if _has_rows(value) else None, values)
    return ITEMS if len(lengths) == 1 else None


def _has_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0


def _loss_of(loss_func: Any, pred: Any, yb: Any, rows: int | None, times: int) -> tuple[float, Tensor]:
    """Return the loss of the items repeated `times` times, and the gradient of the first predictions."""
    leaves: list[tuple[Tensor, int]] = []

    def repeat_rows(value: Any) -> Any:
        return torch.cat([value.detach()[:rows]] * times) if _has_rows(value) else value

    def make_leaf(value: Any) -> Any:
        value = repeat_rows(value)
        if _has_rows(value) and value.is_floating_point():
            leaves.append((value.requires_grad_(), len(value) // times))
        return value

    with torch.enable_grad():
        loss = loss_func(each(make_leaf, pred), *[each(repeat_rows, value) for value in yb])
        found = torch.autograd.grad(loss, [value for value, _ in leaves], allow_unused=True)
    parts = [
        torch.zeros_like(value[:count]) if gradient is None else gradient[:count]
        for gradient, (value, count) in zip(found, leaves, strict=True)
    ]
    return float(loss.detach()), torch.cat(
        [part.detach().as_subclass(Tensor).flatten().double().cpu() for part in parts]
    )
