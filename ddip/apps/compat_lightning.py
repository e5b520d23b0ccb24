"""List the private names of Lightning that the app uses or replaces; see ``protocol/compat.py``.

It is not in the app's package, whose import needs these names. ``packages.py`` says why Lightning is there twice.
"""

from __future__ import annotations

from ddip.protocol.compat import Names

TESTED = "2.6"
"""Versions of Lightning that ddip has been tested with."""
_CORE = (
    "trainer.call._interrupt",
    "trainer.connectors.signal_connector._SignalConnector.register_signal_handlers",
    "tuner.lr_finder._LRCallback.on_train_batch_start",
    "tuner.lr_finder.__lr_finder_restore_params",
    "tuner.lr_finder._try_loop_run",
)
TABLES = (
    Names("lightning", TESTED, core=tuple(f"lightning.pytorch.{name}" for name in _CORE)),
    Names("pytorch_lightning", TESTED, core=tuple(f"pytorch_lightning.{name}" for name in _CORE)),
    Names("torchmetrics", "1.9", core=("torchmetrics.metric.jit_distributed_available",)),
)
