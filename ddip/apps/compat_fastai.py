"""List the private names of fastai and fastcore that the app uses or replaces; see ``protocol/compat.py``.

It is not in the app's package, whose import needs these names.
"""

from __future__ import annotations

from ddip.protocol.compat import Names

_LEARNER = "fastai.learner.Learner"
FASTAI = Names(
    "fastai",
    "2.8",
    core=(
        "fastai.callback.core._inner_loop",
        "fastai.callback.hook.HookCallback._remove",
        "fastai.callback.training.find_bs",
        "fastai.data.load._FakeLoader",
        "fastai.distributed.rank0_first",
        f"{_LEARNER}._do_epoch_validate",
        f"{_LEARNER}._end_cleanup",
        f"{_LEARNER}._set_device",
        "fastai.learner.Recorder._stateattrs",
        "fastai.learner.Recorder._train_mets",
        "fastai.learner.Recorder._valid_mets",
        "fastai.text.core._tokenize_files",
        "fastai.torch_core.maybe_gather",
        "fastai.torch_core.num_distrib",
    ),
)
FASTCORE = Names("fastcore", "2.2", core=("fastcore.xtras.save_config_file or fastcore.foundation.save_config_file",))
